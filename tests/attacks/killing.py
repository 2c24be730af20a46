"""`python killing.py honest|planted COUNT`: attacks.kills in a process of its own, which has no threads yet.

Planted: the noise of a process ends in its process id, so that no step comes again as it was.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks import kills
from quell.torch.noise import CorrelatedNoise


def main(kind: str, count: int) -> None:
    real = CorrelatedNoise.add_
    if kind == "planted":

        def planted(self, grads):
            real(self, grads)
            next(iter(grads)).view(-1)[0] += os.getpid()

        CorrelatedNoise.add_ = planted
    (outcome,) = kills.attack(count, seed=1)
    print(*outcome.breaks, sep="\n")
    print(f"{outcome.tried} kills, {len(outcome.breaks)} breaks, {outcome.note}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
