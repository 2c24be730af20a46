"""Draw old noise again, or keep it? What a step of banded-inverse noise costs either way, and how much to keep.

With p coefficients of C⁻¹, regeneration makes p normals per element and step and keeps nothing. Each old draw that is
kept saves making it, at the price of a float32 vector of the model's size; the newest are kept, the others made again,
the same bits. All costs grow linearly with p. The lines below were measured, in times of a copy of the gradient in the
same run (an H200 with 10⁹ parameters, `benchmarks/results/noise_gpu.md`; two CPU cores with 10⁷,
`benchmarks/results/noise_cpu.md`). The gradient's dtype moves all costs alike and is left out: draws and buffers are
float32 always.

Those of ChaCha8 are not measured but derived. On the H200: linear in the rounds, with Philox's costs as what is left
without any (most of it the transform to normals, which is the same); Philox's own rounds make this too high rather than
too low. On the CPU: ChaCha20's, less what 12 rounds took in a direct comparison of the two on a busy machine, where a
draw of ChaCha8 took 0.61 times as long.
"""

from __future__ import annotations

from typing import Final, NamedTuple

WORTH_IT: Final = 0.8  # memory is spent only where a step then takes at most this part of its time


class Line(NamedTuple):
    """Time of a step: `start` with a single coefficient, `each` more for every further one."""

    start: float
    each: float

    def at(self, coefficients: int) -> float:
        return self.start + self.each * (coefficients - 1)


REGENERATED: Final = {  # by device and generator
    ("cuda", "chacha20"): Line(2.11, 1.88),
    ("cuda", "chacha8"): Line(1.51, 1.20),  # derived: 1.11 + 8/20·(2.11 − 1.11) and 0.74 + 8/20·(1.88 − 0.74)
    ("cuda", "philox"): Line(1.11, 0.74),
    ("cpu", "chacha20"): Line(0.77, 0.45),
    ("cpu", "chacha8"): Line(0.60, 0.28),  # derived: 0.17 less
    ("cpu", "philox"): Line(1.20, 0.57),
}
BUFFERED: Final = {
    ("cuda", "chacha20"): Line(1.57, 0.47),
    ("cuda", "chacha8"): Line(1.61, 0.48),  # derived by the same rule: here memory decides, not the generator
    ("cuda", "philox"): Line(1.64, 0.48),
    ("cpu", "chacha20"): Line(0.73, 0.10),
    ("cpu", "chacha8"): Line(0.56, 0.10),  # derived: 0.17 less
    ("cpu", "philox"): Line(0.87, 0.10),
}


def draws_to_keep(coefficients: int, device: str, generator: str, memory: float) -> int:
    """How many of the p−1 old draws to keep in `memory` (in float32 copies of the model).

    All that fit, if that saves a fifth of a step's time; otherwise none.

    >>> [draws_to_keep(16, "cuda", "chacha20", memory) for memory in (1, 8, 100)]
    [0, 8, 15]
    """
    remade, kept = REGENERATED[device, generator], BUFFERED[device, generator]
    most = int(min(coefficients - 1, memory))
    time = kept.at(most + 1) + remade.each * (coefficients - 1 - most)
    return most if time <= WORTH_IT * remade.at(coefficients) else 0
