"""Write python/managedmem/data/digits.bin.gz from the digits that scikit-learn ships.

Run it only to make the file again: ``python tools/make_digits.py``. It needs scikit-learn; nothing
in the package does. The file is a gzip of 1,797 label bytes (0..9) followed by 1,797 x 64 pixel
bytes (0..16, row by row), in the order of scikit-learn, and comes out the same each time.
"""

from __future__ import annotations

import gzip
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "python/managedmem/data/digits.bin.gz"


def main() -> None:
    """Read the digits from scikit-learn, check their range, and write the packed copy."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    if pixels.shape != (1797, 64) or pixels.min() != 0 or pixels.max() != 16:
        raise SystemExit(f"unexpected data: shape {pixels.shape}, {pixels.min()}..{pixels.max()}")
    content = labels.astype("uint8").tobytes() + pixels.astype("uint8").tobytes()
    # mtime=0 keeps the clock out of the header, so that the same input gives the same file.
    TARGET.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
