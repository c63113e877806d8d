"""Train the digit classifier that the package ships, with the standard library only.

``python tools/train_digits.py`` writes python/managedmem/data/digits-weights.csv;
``python tools/train_digits.py --check`` trains again and compares with that file instead.

Softmax regression: 200 steps of gradient descent with momentum from zero on the cross entropy plus
a small quadratic penalty, over the images outside ``managedmem.digits.HELD_OUT``. Nothing is random
and the held-out images are read for the final count alone. Takes about 10 seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
from operator import mul
from pathlib import Path

from managedmem import digits

TARGET = Path(__file__).resolve().parent.parent / "python/managedmem/data/digits-weights.csv"
STEPS, RATE, MOMENTUM, PENALTY = 200, 1.0, 0.9, 1e-3

Matrix = list[list[float]]


def images() -> tuple[Matrix, bytes]:
    """All images, one row of 64 pixels and a constant 1 each, and their labels."""
    data = digits.load()
    flat, width = data.as_floats(), digits.FEATURES
    rows = [[*flat[i : i + width], 1.0] for i in range(0, len(flat), width)]
    return rows, data.labels


def training_part(rows: Matrix, labels: bytes) -> tuple[Matrix, list[int]]:
    """The images and labels that are not held out."""
    held_out = set(range(len(labels))[digits.HELD_OUT])
    kept = [i for i in range(len(labels)) if i not in held_out]
    return [rows[i] for i in kept], [labels[i] for i in kept]


def errors(weights: Matrix, rows: Matrix, labels: list[int]) -> Matrix:
    """Probability minus truth, by digit and image; ``weights`` holds one row a digit."""
    result: Matrix = [[] for _ in weights]
    for row, label in zip(rows, labels, strict=True):
        scores = [sum(map(mul, row, column)) for column in weights]
        top = max(scores)
        powers = [math.exp(score - top) for score in scores]
        total = sum(powers)
        for digit, power in enumerate(powers):
            result[digit].append(power / total - (digit == label))
    return result


def gradient(weights: Matrix, rows: Matrix, labels: list[int]) -> Matrix:
    """Slope of the loss, in the shape of ``weights``."""
    features = list(zip(*rows, strict=True))
    return [
        [
            sum(map(mul, feature, wrong)) / len(rows) + PENALTY * weight
            for feature, weight in zip(features, column, strict=True)
        ]
        for wrong, column in zip(errors(weights, rows, labels), weights, strict=True)
    ]


def train(rows: Matrix, labels: list[int], steps: int = STEPS) -> Matrix:
    """Weights after that many steps, one row of 65 a digit."""
    weights = [[0.0] * len(rows[0]) for _ in range(digits.CLASSES)]
    speed = [[0.0] * len(rows[0]) for _ in range(digits.CLASSES)]
    for _ in range(steps):
        slope = gradient(weights, rows, labels)
        for column, fast, steep in zip(weights, speed, slope, strict=True):
            for j, value in enumerate(steep):
                fast[j] = MOMENTUM * fast[j] - RATE * value
                column[j] += fast[j]
    return weights


def text_of(weights: Matrix) -> str:
    """The file's content: one line a pixel (the last: the constant), one number a digit."""
    head = "# written by tools/train_digits.py: 64 pixels and a constant by 10 digits\n"
    lines = [",".join(f"{value:.6f}" for value in line) for line in zip(*weights, strict=True)]
    return head + "\n".join(lines) + "\n"


def held_out_accuracy(weights: Matrix, rows: Matrix, labels: bytes) -> float:
    """Share of the held-out images that the weights get right."""
    found = bytes(
        max(range(digits.CLASSES), key=lambda digit: sum(map(mul, row, weights[digit])))
        for row in rows
    )
    return digits.accuracy(found, labels)


def main() -> int:
    """Train, then write the file, or compare with the one that is there."""
    parser = argparse.ArgumentParser(description="Train the digit classifier of the package.")
    parser.add_argument("--check", action="store_true", help="compare with the file, write nothing")
    check = parser.parse_args().check
    rows, labels = images()
    weights = train(*training_part(rows, labels))
    print(f"accuracy on the held-out images: {held_out_accuracy(weights, rows, labels):.4f}")
    if not check:
        TARGET.write_text(text_of(weights), "ascii")
        return 0
    flat = (value for line in zip(*weights, strict=True) for value in line)
    worst = max(abs(a - b) for a, b in zip(digits.load_weights(), flat, strict=True))
    print(f"largest difference from {TARGET.name}: {worst:.1e}")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
