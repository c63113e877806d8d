"""The server of a group of models: `python -m benchmarks.models GROUP` prints its rows as JSON."""

from __future__ import annotations

import sys

from ..measure import reason
from .process import serve

if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except RuntimeError as error:
        print(reason(error), flush=True)
        sys.exit(1)
