"""The handwritten digits that the demo and the examples classify, and a classifier trained on them.

Owns the two files under ``data/``: 1,797 images of 8 x 8 pixels (UCI, CC BY 4.0, as scikit-learn
ships them; see ``data/LICENSE-digits.txt``) and the weights of a linear classifier that
``tools/train_digits.py`` computed from two thirds of them. Standard library only.
"""

from __future__ import annotations

import gzip
from array import array
from importlib import resources
from typing import NamedTuple

__all__ = ["CLASSES", "FEATURES", "HELD_OUT", "Digits", "accuracy", "load", "load_weights"]

CLASSES = 10
"""The number of different digits."""

FEATURES = 64
"""Pixels of one image (8 x 8)."""

HELD_OUT = slice(2, None, 3)
"""The images that training did not use: every third, beginning with the third."""

_COUNT = 1797
_BRIGHTEST = 16


class Digits(NamedTuple):
    """Images and their labels, in the order of scikit-learn's ``load_digits``."""

    pixels: bytes
    """One byte (0..16) per pixel, 64 per image, image after image."""
    labels: bytes
    """One byte (0..9) per image: the digit that it shows."""

    def __repr__(self) -> str:
        return f"Digits({len(self.labels)} images of {FEATURES} pixels)"

    def as_floats(self) -> array[float]:
        """All pixels scaled to 0..1, as 32-bit floats, image after image."""
        scale = [value / _BRIGHTEST for value in range(_BRIGHTEST + 1)]
        return array("f", map(scale.__getitem__, self.pixels))


def load() -> Digits:
    """Read the 1,797 images that come with the package."""
    packed = resources.files(__package__).joinpath("data/digits.bin.gz").read_bytes()
    content = gzip.decompress(packed)
    if len(content) != _COUNT * (1 + FEATURES):
        raise ValueError(f"data/digits.bin.gz holds {len(content)} bytes, not 1797 x 65")
    return Digits(pixels=content[_COUNT:], labels=content[:_COUNT])


def load_weights() -> array[float]:
    """Read the trained classifier: 65 x 10 32-bit floats, row by row.

    Row j < 64 holds the weight of pixel j in the score of each digit, row 64 the bias. The digit
    with the highest score is the answer.
    """
    text = resources.files(__package__).joinpath("data/digits-weights.csv").read_text("ascii")
    rows = [line.split(",") for line in text.splitlines() if not line.startswith("#")]
    if len(rows) != FEATURES + 1 or any(len(row) != CLASSES for row in rows):
        raise ValueError("data/digits-weights.csv does not hold 65 rows of 10 numbers")
    return array("f", [float(cell) for row in rows for cell in row])


def accuracy(predicted: bytes, labels: bytes) -> float:
    """The share of held-out images with the right digit.

    ``predicted`` has one byte per image, for one or more copies of the 1,797. Images that the
    classifier was trained on do not count.
    """
    if not predicted or len(predicted) % len(labels):
        raise ValueError(f"length {len(predicted)} is not a multiple of the {len(labels)} labels")
    truth = labels[HELD_OUT]
    right = total = 0
    for start in range(0, len(predicted), len(labels)):
        guesses = predicted[start : start + len(labels)][HELD_OUT]
        right += sum(map(int.__eq__, guesses, truth))
        total += len(truth)
    return right / total
