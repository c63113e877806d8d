#!/usr/bin/env bash
# Builds the fuzz targets with clang, lets each find a fault that is planted in a copy of the sources,
# and runs them side by side. Prints executions and coverage; fails where one crashes.
#
# Usage: tests/fuzz/run.sh BUILD_FOLDER [SECONDS], 60 without. CUDA_HOME is a folder whose include/ holds
# cuda.h of CUDA 13, PYTHON the interpreter to embed (python3). New inputs go to
# BUILD_FOLDER/TARGET-run/found, those that crash to BUILD_FOLDER/TARGET-run. Add the latter to
# tests/fuzz/corpus/TARGET with the change that mends the fault.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${1:?usage: tests/fuzz/run.sh BUILD_FOLDER [SECONDS]}
seconds=${2:-60}
python=${PYTHON:-python3}
cuda=${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}
[ -f "$cuda/include/cuda.h" ] || {
    echo "no cuda.h found: set CUDA_HOME to a folder with include/cuda.h of CUDA 13" >&2
    exit 1
}
mkdir -p "$build"
build=$(cd "$build" && pwd)
flags=(-std=c11 -D_GNU_SOURCE -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Werror
    -fno-sanitize-recover=undefined -isystem "$cuda/include")
target=-fsanitize=fuzzer,address,undefined
library=-fsanitize=fuzzer-no-link,address,undefined

# The flags of a program that hosts this interpreter.
mapfile -t host < <("$python" - <<'PYTHON'
import sys, sysconfig
get = lambda name: sysconfig.get_config_var(name) or ""
print(sysconfig.get_path("include"))
print(" ".join([f"-L{get('LIBDIR')}", f"-L{get('LIBPL')}", f"-Wl,-rpath,{get('LIBDIR')}",
    f"-lpython{get('LDVERSION')}", get("LIBS"), get("SYSLIBS"), "-rdynamic"]))
print(sys.base_prefix)
PYTHON
)
read -ra link <<<"${host[1]}"

# --- options: the parser of the emulated driver

# build_options PROGRAM PARSER
build_options() {
    clang "${flags[@]}" "$target" "-I$root/src/emulator" "-DPARSER=\"$2\"" "$here/options.c" \
        -o "$1" -lpthread
}

# --- records: the parser of the kernel module's records

# build_records PROGRAM PARSER
build_records() {
    clang "${flags[@]}" "$target" "-I$root/src/_managedmem/trace" "-DPARSER=\"$2\"" \
        "$here/records.c" -o "$1"
}

# --- protocols: the extension, in a package of its own

# compile OBJECT SOURCE
compile() {
    clang "${flags[@]}" "$library" -UNDEBUG -fPIC -fvisibility=hidden -DPy_LIMITED_API=0x030b0000 \
        "-I${host[0]}" "-I$root/src/_managedmem/python" -c "$2" -o "$1"
}

# link_extension PACKAGE_PARENT OBJECT...
link_extension() {
    mkdir -p "$1"
    cp -r "$root/python/managedmem" "$1"
    rm -f "$1"/managedmem/*.so
    cp "$build/libmanagedmem_emulator.so" "$1/managedmem"
    clang "$library" -shared -o "$1/managedmem/_managedmem.abi3.so" "${@:2}" -lpthread -ldl
}

build_protocols() {
    local source room
    rm -rf "$build/objects"
    mkdir "$build/objects"
    for source in "$root"/src/_managedmem/*/*.c; do
        [ "$(jobs -rp | wc -l)" -lt 2 ] || wait -n
        room=$(basename "$(dirname "$source")")
        compile "$build/objects/$room-$(basename "$source" .c).o" "$source" &
    done
    while [ "$(jobs -rp | wc -l)" -gt 0 ]; do wait -n; done
    clang "${flags[@]}" "$library" -fPIC -shared -fvisibility=hidden \
        -o "$build/libmanagedmem_emulator.so" "$root"/src/emulator/*.c -lpthread -ldl
    link_extension "$build/package" "$build"/objects/*.o
    clang "${flags[@]}" "$target" "-I${host[0]}" "$here/embed.c" -o "$build/protocols" "${link[@]}"
}

# --- running

export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
unset MANAGEDMEM_EMULATOR

# run_target NAME PROGRAM OPTION-OR-INPUT...: options and records in C, protocols in an interpreter
run_target() {
    local name=$1
    shift
    case $name in
    options | records) "$@" ;;
    protocols)
        # Python's own allocator would hide overflows from ASan.
        PYTHONHOME=${host[2]} PYTHONPATH=${package:-$build/package}:$here PYTHONMALLOC=malloc \
            PYTHONDONTWRITEBYTECODE=1 MANAGEDMEM_DRIVER=emulator "$@"
        ;;
    esac
}

# must_find NAME REPORT PROGRAM: the corpus alone shows the fault that was planted
must_find() {
    if run_target "$1" "$3" -runs=0 "-artifact_prefix=$build/planted-" "$here/corpus/$1" \
        >"$build/planted.log" 2>&1 ||
        ! grep -q "$2" "$build/planted.log"; then
        tail -20 "$build/planted.log"
        echo "FAILED: $1 does not find a planted fault ($2)" >&2
        exit 1
    fi
    echo "$1 finds a planted fault: $(grep -m1 "$2" "$build/planted.log")"
}

# plant SED-SCRIPT SOURCE: a copy with a fault
plant() {
    sed "$1" "$2" >"$build/planted.c"
    if cmp -s "$build/planted.c" "$2"; then
        echo "FAILED: $2 has no line to plant a fault in with $1" >&2
        exit 1
    fi
}

# Lets the parser take numbers beyond its bound.
plant_in_options() {
    plant 's/ \*out <= high/ *out <= high + 100/' "$root/src/emulator/config.c"
    build_options "$build/planted-options" "$build/planted.c"
    must_find options 'not so: ' "$build/planted-options"
}

# Removes the check that a processor has a place in the table.
plant_in_records() {
    plant 's/index >= MM_UVM_PROCESSORS/p == NULL/' "$root/src/_managedmem/trace/uvm_records.c"
    build_records "$build/planted-records" "$build/planted.c"
    must_find records 'out of bounds' "$build/planted-records"
}

# Removes the check that an array has no more axes than there is room for.
plant_in_protocols() {
    local foreign=$root/src/_managedmem/python/foreign_layout.c package=$build/planted
    plant 's/count < 0 || count > MM_FOREIGN_DIMENSIONS/count < 0/' "$foreign"
    compile "$build/planted.o" "$build/planted.c"
    link_extension "$package" "$build/planted.o" \
        $(printf '%s\n' "$build"/objects/*.o | grep -v /python-foreign_layout.o)
    must_find protocols 'stack-buffer-overflow' "$build/protocols"
}

# Prints the figures of a run, which libFuzzer has in its last lines.
fuzz() {
    local name=$1 out=$build/$1-run
    mkdir -p "$out/found"
    (cd "$out" && run_target "$name" nice "$build/$name" "-max_total_time=$seconds" -timeout=20 \
        -rss_limit_mb=3000 -print_final_stats=1 "${@:2}" found "$here/corpus/$name" \
        >"$out/log" 2>&1) || {
        tail -60 "$out/log"
        echo "FAILED: $name; the input is $(ls "$out"/{crash,timeout,oom}-* 2>/dev/null)" >&2
        return 1
    }
    awk -v name="$name" '
        /INITED|NEW|REDUCE|DONE/ {for (i = 1; i < NF; i++) if ($i ~ /^(cov|ft|corp):/) last[$i] = $(i + 1)}
        /number_of_executed_units/ {runs = $2}
        /average_exec_per_sec/ {rate = $2}
        END {printf "%s: %d executions, %d a second, %d edges, %d features, %s inputs\n",
            name, runs, rate, last["cov:"], last["ft:"], last["corp:"]}' "$out/log"
}

build_options "$build/options" "$root/src/emulator/config.c"
build_records "$build/records" "$root/src/_managedmem/trace/uvm_records.c"
build_protocols
plant_in_options
plant_in_records
plant_in_protocols
failed=
fuzz options "-dict=$here/options.dict" -max_len=256 &
options=$!
fuzz records -max_len=1024 &
records=$!
fuzz protocols -max_len=200 || failed=1
wait $options || failed=1
wait $records || failed=1
[ -z "$failed" ]
