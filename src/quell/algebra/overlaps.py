"""How much noise a Toeplitz C needs once balls-in-bins sampling amplifies, to a shape: with a gradient, for searches.

Without amplification noise must hide the heaviest pattern, so an optimal strategy makes the energy G_00 of a pattern
small. With it, an example hides among the b patterns it could have had, which need less noise the less they overlap.
The simplest divergence between "takes part in one of them" and "takes no part" has a closed form, the Rényi divergence
of order 2, ln mean_{jj'} exp(G_jj'/σ²) over all pairs of patterns. The *amplified energy* is the σ² at which it has a
given value R:

    E(c) = 1/u,  where  ln Σ_δ P(δ)·exp(u·G_δ) = R,   G_δ = Σ_{|s|<k} (k − |s|)·r(δ + s·b),   r = autocorrelation of c,

P(δ) the share of pairs of bins δ steps apart, cut-offs at the end of the run left out. For large R it is proportional
to G_0, the energy without amplification; for small R to the mean overlap. It only shapes strategies: what they promise
is up to `quell.privacy`.
"""

from __future__ import annotations

import math

import numpy as np

from quell._types import Array


def amplified_energy(c: Array, separation: int, count: int, divergence: float) -> tuple[float, Array]:
    """E(c) and its gradient, for `count` participations `separation` steps apart, c ≥ 0."""
    b = separation
    rows = -(-(len(c) + 1) // b)  # lags up to len(c), b in a row
    size = 1 << (2 * len(c) - 1).bit_length()
    spectrum = np.fft.rfft(c, size)
    lags = np.zeros(rows * b + 1)
    lags[: len(c)] = np.fft.irfft(spectrum * spectrum.conj(), size)[: len(c)]
    times = np.maximum(count - np.arange(rows + 1.0), 0.0)[:, None]  # pairs of participations s epochs apart
    overlaps = np.sum(times[:-1] * lags[:-1].reshape(rows, b), axis=0)  # δ + s·b
    overlaps += np.sum(times[1:] * lags[1:].reshape(rows, b), axis=0)[::-1]  # s·b − δ
    apart = np.arange(b, dtype=np.float64)
    share = 2.0 * (b - apart) / b**2
    share[0] = 1.0 / b
    u = _reached(overlaps, share, divergence)
    weights = share * np.exp(u * overlaps)
    weights /= u * float(weights @ overlaps)  # dE = Σ weights·dG
    slope = np.zeros(rows * b + 1)
    slope[:-1] = (times[:-1] * weights).reshape(-1)
    slope[1:] += (times[1:] * weights[::-1]).reshape(-1)
    both = np.zeros(size)
    both[: len(c)] = slope[: len(c)]
    both[size - len(c) + 1 :] += slope[1 : len(c)][::-1]  # r(ℓ) is also r(−ℓ)
    both[0] += slope[0]
    gradient = np.fft.irfft(np.fft.rfft(both) * spectrum, size)[: len(c)]
    return 1.0 / u, np.asarray(gradient)


def _reached(overlaps: Array, share: Array, divergence: float) -> float:
    """The u at which the divergence is reached: Newton's method from above, where a convex function never misses."""
    u = (divergence - math.log(share[0])) / float(overlaps[0])
    for _ in range(100):
        grown = share * np.expm1(u * overlaps)
        excess = math.log1p(float(grown.sum())) - divergence
        step = excess / (float((grown + share) @ overlaps) / (1.0 + float(grown.sum())))
        u -= step
        if step <= 1e-13 * u:
            break
    return u
