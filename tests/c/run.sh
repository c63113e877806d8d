#!/usr/bin/env bash
# Builds the C unit tests and the emulated driver and runs them, once per sanitizer: address and
# undefined behaviour together, then threads. Needs no Python.
#
# Usage: tests/c/run.sh BUILD_FOLDER [TEST...], as in tests/c/run.sh build/c test_plan; all tests if
# none is named. CC chooses the compiler, CUDA_HOME the folder whose include/ holds cuda.h of CUDA 13;
# without it the folder of nvcc or of the header package is taken. With COVERAGE=1 they run once, under
# the first two, and leave what gcov reads in the build folder.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:?usage: tests/c/run.sh BUILD_FOLDER [TEST...]}
mkdir -p "$build"
build=$(cd "$build" && pwd)
shift
tests=("$@")
[ ${#tests[@]} -gt 0 ] || mapfile -t tests < <(cd "$root/tests/c" && ls test_*.c | sed 's/\.c$//')
compiler=${CC:-cc}
nvcc=$(readlink -f "$(command -v nvcc || true)" || true)
package=$(python3 -c 'import nvidia.cu13 as found; print(*found.__path__)' 2>/dev/null || true)
for cuda in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${nvcc%/bin/nvcc}" "$package" none; do
    [ ! -f "$cuda/include/cuda.h" ] || break
done
if [ "$cuda" = none ]; then
    echo "no cuda.h found: set CUDA_HOME to a folder with include/cuda.h of CUDA 13" >&2
    exit 1
fi
flags=(-std=c11 -D_GNU_SOURCE -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Werror
    "-I$root/src/_managedmem" "-I$root/tests/c" -isystem "$cuda/include")
export MANAGEDMEM_EMULATOR=devices=2
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

sanitizers=(address,undefined thread)
if [ -n "${COVERAGE:-}" ]; then
    sanitizers=(address,undefined) # as in setup.py, so that gcovr finds the same branches in both
    absent=bool,enum,integer-divide-by-zero,nonnull-attribute,returns-nonnull-attribute
    flags+=(-O0 --coverage -fprofile-update=atomic "-fno-sanitize=$absent")
fi

for sanitizer in "${sanitizers[@]}"; do
    out=$build/${sanitizer%%,*}
    mkdir -p "$out"
    "$compiler" "-fsanitize=$sanitizer" "${flags[@]}" -fPIC -shared -fvisibility=hidden \
        -o "$out/libemulator.so" "$root"/src/emulator/*.c -lpthread -ldl
    for kind in forking odd hooked; do
        "$compiler" "-fsanitize=$sanitizer" "${flags[@]}" -fPIC -shared -o "$out/lib$kind.so" \
            "$root/tests/c/${kind}_driver.c" -Wl,--no-as-needed "$out/libemulator.so" -ldl
    done
    (cd "$out" && "$compiler" "-fsanitize=$sanitizer" "${flags[@]}" -c \
        "$root"/tests/c/{world,failing_allocations,counted_waits}.c \
        "$root"/src/_managedmem/{driver,memory,trace,working}/*.c)
    for name in "${tests[@]}"; do
        "$compiler" "-fsanitize=$sanitizer" "${flags[@]}" -o "$out/$name" "$root/tests/c/$name.c" \
            "$out"/*.o -Wl,--wrap={malloc,calloc,realloc,free,pthread_cond_wait} -lpthread -ldl
        echo "--- $name, sanitized for $sanitizer"
        "$out/$name" "$out/libemulator.so"
    done
done
