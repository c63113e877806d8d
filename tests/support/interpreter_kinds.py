"""The kinds of subinterpreters that tests are parametrized with."""

import sys

import pytest

KINDS = [
    pytest.param(
        "isolated",
        marks=pytest.mark.skipif(
            sys.version_info < (3, 12), reason="own-GIL interpreters came with 3.12"
        ),
    ),
    "legacy",
]
