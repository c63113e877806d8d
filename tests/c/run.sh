#!/usr/bin/env bash
# Builds the C unit tests and the emulated driver and runs them, once per sanitizer: address and
# undefined behaviour together, then threads. Needs no Python.
#
# Usage: tests/c/run.sh BUILD_FOLDER. CC chooses the compiler, CUDA_HOME the folder whose include/
# holds cuda.h of CUDA 13; without it the folder of nvcc is taken.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${1:?usage: tests/c/run.sh BUILD_FOLDER}
compiler=${CC:-cc}
cuda=${CUDA_HOME:-${CUDA_PATH:-}}
if [ -z "$cuda" ] && nvcc=$(command -v nvcc); then
    cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
fi
if [ ! -f "$cuda/include/cuda.h" ]; then
    echo "no cuda.h found: set CUDA_HOME to a folder with include/cuda.h of CUDA 13" >&2
    exit 1
fi
flags=(-std=c11 -D_GNU_SOURCE -g -O1 -fno-omit-frame-pointer -Wall -Wextra -Wshadow -Werror
    "-I$root/src/_managedmem" "-I$root/tests/c" -isystem "$cuda/include")
export MANAGEDMEM_EMULATOR=devices=2
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

for sanitizer in address,undefined thread; do
    out=$build/${sanitizer%%,*}
    mkdir -p "$out"
    "$compiler" "${flags[@]}" "-fsanitize=$sanitizer" -fPIC -shared -fvisibility=hidden \
        -o "$out/libemulator.so" "$root"/src/emulator/*.c -lpthread -ldl
    for kind in forking odd; do
        "$compiler" "${flags[@]}" "-fsanitize=$sanitizer" -fPIC -shared -o "$out/lib$kind.so" \
            "$root/tests/c/${kind}_driver.c" -Wl,--no-as-needed "$out/libemulator.so" -ldl
    done
    for test in "$root"/tests/c/test_*.c; do
        name=$(basename "$test" .c)
        "$compiler" "${flags[@]}" "-fsanitize=$sanitizer" -o "$out/$name" "$test" \
            "$root/tests/c/world.c" "$root"/src/_managedmem/{driver,memory}/*.c -lpthread -ldl
        echo "--- $name, sanitized for $sanitizer"
        "$out/$name" "$out/libemulator.so"
    done
done
