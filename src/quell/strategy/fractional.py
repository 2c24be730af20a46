"""Damped cancellation: C⁻¹ = the first `bands` terms of (1 − λx)^γ, and its two-band member λCGD.

γ interpolates from independent noise (γ = 0) over BISR for prefix sums (γ = ½, λ = 1) to λCGD (γ = 1), where
each step cancels the share λ of the previous step's noise (arXiv:2601.22334). All of them are remade from
counters: no buffers.
"""

from __future__ import annotations

import math

from quell.algebra import series
from quell.sampling import Participation
from quell.strategy.family import Candidates, Family, Limits
from quell.strategy.structure import ToeplitzStrategy
from quell.workload import Workload


def fractional(
    workload: Workload, _: Participation, bands: int, gamma: float, lambda_: float = 1.0
) -> ToeplitzStrategy:
    """C⁻¹ = the first `bands` coefficients of (1 − λx)^γ."""
    bands = min(bands, workload.steps)
    noising = series.binomial(gamma, lambda_, bands)
    parameters = {"bands": bands, "gamma": gamma, "lambda": lambda_}
    return ToeplitzStrategy("fractional", workload.steps, given_noising=noising, parameters=parameters)


def lambda_cgd(workload: Workload, _: Participation, lambda_: float) -> ToeplitzStrategy:
    """C⁻¹ = 1 − λx: cancel the share λ of the previous step's noise."""
    noising = series.binomial(1.0, lambda_, min(2, workload.steps))
    return ToeplitzStrategy("lambda_cgd", workload.steps, given_noising=noising, parameters={"lambda": lambda_})


def lambda_cgd_sensitivity(lambda_: float, participation: Participation) -> float:
    """Sensitivity of λCGD in closed form (eq. 13–14), also when the last block is shorter or longer than the others.

    >>> round(lambda_cgd_sensitivity(0.95, Participation(3900, 390)), 4)
    10.1274
    """
    b, k = participation.separation, participation.count
    last = participation.steps - (k - 1) * b
    # Within block j the columns add up to λ^r·(1 + λ^b + … + λ^{jb}), r steps after its start.
    running = [_geometric(lambda_**b, j) for j in range(1, k + 1)]
    squared = _geometric(lambda_**2, b) * math.fsum(s * s for s in running[:-1])
    return math.sqrt(squared + _geometric(lambda_**2, last) * running[-1] ** 2)


def lambda_cgd_query_variance(lambda_: float, step: int) -> float:
    """Squared norm of row `step` (from 1) of A·C⁻¹ for prefix sums (eq. 15): MaxSE² at the last step.

    >>> lambda_cgd_query_variance(0.5, 3)
    1.5
    """
    return 1.0 + (1.0 - lambda_) ** 2 * (step - 1)


def lambda_cgd_mean_variance(lambda_: float, steps: int) -> float:
    """Mean over the queries of `lambda_cgd_query_variance`: RMSE² per unit of noise for prefix sums (eq. 50)."""
    return 1.0 + (1.0 - lambda_) ** 2 * (steps - 1) / 2


def _geometric(ratio: float, terms: int) -> float:
    """1 + ratio + … + ratio^{terms−1}, stable as the ratio approaches 1."""
    if ratio <= 0.0 or ratio == 1.0:
        return float(terms) if ratio == 1.0 else 1.0
    return math.expm1(terms * math.log(ratio)) / (ratio - 1.0)


def _lambdas(limits: Limits) -> Candidates:
    return [{"lambda": 1 - 2.0**-e} for e in range(1, 12)] if limits.draws >= 2 else []


def _powers(limits: Limits) -> Candidates:
    bands = limits.powers_of_two(limits.draws)
    return [{"bands": p, "gamma": gamma} for p in bands for gamma in (0.6, 0.7, 0.8, 0.9)]


LAMBDA_CGD = Family(
    "lambda_cgd",
    "cancels the share lambda of the previous step's noise, needs no buffers (arXiv:2601.22334)",
    lambda_cgd,
    _lambdas,
    required=("lambda",),
    normalisable=True,
)
FRACTIONAL = Family(
    "fractional",
    "first `bands` terms of (1 - lambda x)^gamma as C^-1: between identity, lambda_cgd and bisr",
    fractional,
    _powers,
    required=("bands", "gamma"),
    optional={"lambda": 1.0},
    normalisable=True,
)
