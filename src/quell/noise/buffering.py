"""Draw old noise again, or keep it? What a step of banded-inverse noise costs either way, and which is worth it.

With p coefficients of C⁻¹, regeneration makes p normals per element and step and keeps nothing; buffering makes one
and reads p−1 kept ones: the same bits, at the price of p−1 float32 vectors of the model's size. Both costs grow
linearly with p. The lines below were measured, in times of a copy of the gradient in the same run (an H200 with 10⁹
parameters, `benchmarks/results/noise_gpu.md`; two CPU cores with 10⁷, `benchmarks/results/noise_cpu.md`). The
gradient's dtype moves both costs alike and is left out: draws and buffers are float32 always.
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
    ("cuda", "philox"): Line(1.11, 0.74),
    ("cpu", "chacha20"): Line(0.77, 0.45),
    ("cpu", "philox"): Line(1.20, 0.57),
}
BUFFERED: Final = {
    ("cuda", "chacha20"): Line(1.57, 0.47),
    ("cuda", "philox"): Line(1.64, 0.48),
    ("cpu", "chacha20"): Line(0.73, 0.10),
    ("cpu", "philox"): Line(0.87, 0.10),
}


def worth_buffering(coefficients: int, device: str, generator: str, memory: float) -> bool:
    """Whether p−1 kept vectors fit `memory` (in float32 copies of the model) and save a fifth of a step's time.

    >>> worth_buffering(16, "cuda", "chacha20", memory=15), worth_buffering(16, "cuda", "chacha20", memory=14)
    (True, False)
    """
    case = (device, generator)
    faster = BUFFERED[case].at(coefficients) <= WORTH_IT * REGENERATED[case].at(coefficients)
    return faster and 0 < coefficients - 1 <= memory
