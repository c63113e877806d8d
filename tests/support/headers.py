"""The CUDA headers of this machine, for the tests that compile a C program."""

import os
import re
import shutil
import sys
from pathlib import Path

OLDEST_HEADERS = 13000


def header_version(include):
    header = include / "cuda.h"
    text = header.read_text(errors="replace") if header.is_file() else ""
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    return int(found.group(1)) if found else 0


def cuda_include():
    """The first folder with new enough CUDA headers, in the order of setup.py; else None."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    roots += [Path(nvcc).resolve().parents[1] if nvcc else None, "/usr/local/cuda"]
    places = [Path(root) / "include" for root in roots if root]
    places += [Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry]
    return next((p for p in places if header_version(p) >= OLDEST_HEADERS), None)
