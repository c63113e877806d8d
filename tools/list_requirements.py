"""Lists the requirements of extras in pyproject.toml: python tools/list_requirements.py EXTRA...

One a line, as pip install -r reads them. Needs only the standard library.
"""

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(chosen):
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    if unknown := [name for name in chosen if name not in extras]:
        raise SystemExit(f"no extra {', '.join(unknown)}; there are: {', '.join(extras)}")
    for name in chosen:
        print(*extras[name], sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
