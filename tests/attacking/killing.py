"""`python killing.py HONEST PLANTED`: attacks.kills, so many times each, in a process that has no threads yet.

Planted is noise that depends on the process, so that no step comes again as it was.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from attacks import kills
from quell.torch.noise import CorrelatedNoise

real = CorrelatedNoise.add_


def planted(self, grads):
    real(self, grads)
    next(iter(grads)).view(-1)[0] += os.getpid()


def report(count: int) -> None:
    (outcome,) = kills.attack(count, seed=1)
    print(*outcome.breaks, sep="\n")
    print(f"{outcome.tried} kills, {len(outcome.breaks)} breaks, {outcome.note}")


if __name__ == "__main__":
    report(int(sys.argv[1]))
    CorrelatedNoise.add_ = planted
    report(int(sys.argv[2]))
