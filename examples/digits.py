"""scikit-learn's digits as an .npz file for `quell train`: 1,200 examples and some to validate on, 400 to test on."""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_digits

TEST = 400


def write(path: str) -> None:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = images[order] / 16, labels[order]  # pixels are 0 to 16
    np.savez(path, x=x[TEST:], y=y[TEST:], x_test=x[:TEST], y_test=y[:TEST])


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "digits.npz")
