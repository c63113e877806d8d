"""Makes compile_commands.json, which clang-tidy reads, from the commands that a build ran.

    python tools/compile_commands.py NOTED OUTPUT

NOTED holds, for each command, its folder and its arguments, each followed by a zero byte, and then
a line feed and another zero byte. This is what printf '%s\\0' "$PWD" "$@" $'\\n' writes. Commands
that compile nothing are left out.
"""

import json
import sys
from pathlib import Path

# gcc's switches for warnings and generated code: clang knows some of them, and needs none.
DROPPED = ("-f", "-W", "-O", "-DNDEBUG")


def entries(noted):
    """One entry for each source of each command that compiles."""
    for command in noted.split("\n\0")[:-1]:
        folder, *arguments = command.split("\0")[:-1]
        if "-c" not in arguments:
            continue
        kept = ["clang", *(each for each in arguments if not each.startswith(DROPPED))]
        for source in arguments:
            if source.endswith(".c"):
                yield {"directory": folder, "file": source, "arguments": kept}


def main(noted, output):
    found = list(entries(Path(noted).read_text()))
    if not found:
        raise SystemExit(f"{noted} holds no command that compiles")
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
