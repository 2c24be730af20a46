"""Writes patients.csv, a made-up table to try `quell train` with.

python examples/patients.py patients.csv
"""

from __future__ import annotations

import csv
import sys
from random import Random


def write(path: str, rows: int = 3000) -> None:
    """People who are ill rather if they are old, smoke or have a high blood pressure."""
    random = Random(0)
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["age", "city", "smoker", "pressure", "outcome"])
        for _ in range(rows):
            age, smoker = random.randint(18, 95), random.random() < 0.3
            pressure = round(random.gauss(110 + age / 3, 15))
            risk = (age - 55) / 15 + 1.5 * smoker + (pressure - 130) / 20 + random.gauss(0, 0.7)
            cells = [age, random.choice(["Oslo", "Rome", "Lima"]), "yes" if smoker else "no", pressure]
            table.writerow([*cells, "ill" if risk > 0 else "healthy"])


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "patients.csv")
