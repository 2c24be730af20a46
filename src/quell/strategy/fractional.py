"""Damped cancellation: C⁻¹ = the first `bands` terms of (1 − λx)^γ, and its two-band member λCGD.

γ interpolates from independent noise (γ = 0) over BISR for prefix sums (γ = ½, λ = 1) to λCGD (γ = 1), where
each step cancels the share λ of the previous step's noise (arXiv:2601.22334). All of them are remade from
counters: no buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np

from quell.algebra import series
from quell.participation import Participation
from quell.strategy.family import Candidates, Family, Line, Space
from quell.strategy.optimised import decoder
from quell.strategy.structure import Parameter, ToeplitzStrategy
from quell.workload import Workload

_POINTS = 20  # values on a continuous line
_DAMPING = 3.0  # the middle of the paper's 2 to 4


def fractional(
    workload: Workload,
    participation: Participation,
    bands: int,
    gamma: float | None = None,
    lambda_: float = 1.0,
    objective: str = "rmse",
) -> ToeplitzStrategy:
    """C⁻¹ = the first `bands` coefficients of (1 − λx)^γ, γ the best for the objective where it is not given."""
    bands = min(bands, workload.steps)
    if gamma is None:
        gamma = _best_power(workload, participation, bands, lambda_, objective)
    noising = series.binomial(gamma, lambda_, bands)
    parameters: dict[str, Parameter] = {"bands": bands, "gamma": gamma, "lambda": lambda_}
    return ToeplitzStrategy("fractional", workload.steps, given_noising=noising, parameters=parameters)


def lambda_cgd(
    workload: Workload, participation: Participation, lambda_: float | None = None, objective: str = "rmse"
) -> ToeplitzStrategy:
    """C⁻¹ = 1 − λx: cancel the share λ of the previous step's noise; λ the best for the objective if not given."""
    if lambda_ is None:
        lambda_ = best_lambda(workload, participation, objective)
    noising = series.binomial(1.0, lambda_, min(2, workload.steps))
    return ToeplitzStrategy("lambda_cgd", workload.steps, given_noising=noising, parameters={"lambda": lambda_})


@lru_cache(maxsize=8)
def best_lambda(workload: Workload, participation: Participation, objective: str = "rmse") -> float:
    """The λ that minimises sensitivity × error, or for "training" one that cancels less.

    Models trained with the λ of least RMSE over-correlate: the best λ was 2 to 4 times smaller on the scale
    1/(1−λ) in the experiments of arXiv:2601.22334 (§5.1); "training" takes a third of it.

    >>> from quell.workload import prefix
    >>> round(best_lambda(prefix(3900), Participation(3900, 390)), 3)
    0.978
    """
    task = decoder(workload, 2, last_only=objective == "maxse")

    def score(log_memory: float) -> float:
        lambda_ = -math.expm1(-log_memory)  # 1/(1−λ) = e^log_memory
        error, _, _ = task.of_product(np.array([1.0, -lambda_]))
        return math.log(error) / 2 + math.log(lambda_cgd_sensitivity(lambda_, participation))

    memory = math.exp(_minimise(score, 0.0, math.log(20.0 * workload.steps)))
    return 1.0 - 1.0 / max(memory / _DAMPING if objective == "training" else memory, 1.0)


def _best_power(workload: Workload, participation: Participation, bands: int, lambda_: float, objective: str) -> float:
    """The γ that minimises sensitivity × error."""
    from quell.algebra.toeplitz import energy_of_inverse, leftmost_energy

    task = decoder(workload, bands, last_only=objective == "maxse")
    n = workload.steps
    columns = partial(leftmost_energy, steps=n, separation=participation.separation, count=participation.count)

    def score(gamma: float) -> float:
        theta = series.binomial(gamma, lambda_, bands)
        energy, _ = energy_of_inverse(theta, columns, n)
        return math.log(task.of_product(theta)[0]) + math.log(energy)

    return _minimise(score, 0.0, 1.0)


def _minimise(score: Callable[[float], float], low: float, high: float) -> float:
    """The minimiser of a function with one valley, by bounded Brent search."""
    from scipy.optimize import minimize_scalar

    return float(minimize_scalar(score, bounds=(low, high), method="bounded", options={"xatol": 1e-9}).x)


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


def _geometric(ratio: float, terms: int) -> float:
    """1 + ratio + … + ratio^{terms−1}, stable as the ratio approaches 1."""
    if ratio <= 0.0 or ratio == 1.0:
        return float(terms) if ratio == 1.0 else 1.0
    return math.expm1(terms * math.log(ratio)) / (ratio - 1.0)


def _regenerated(space: Space) -> Candidates:
    return [{}] if space.draws >= 2 and space.participation.steps >= 2 else []


def _memories(_: Family, space: Space) -> Iterator[Line]:
    """λ by its memory 1/(1−λ), on a logarithmic scale up to that of the least RMSE without amplification."""
    if space.correlates and space.draws > 1:
        longest = math.log(1.0 / (1.0 - min(best_lambda(space.workload, space.participation), 1 - 1e-12)))
        yield [{"lambda": -math.expm1(-float(each))} for each in np.linspace(0.0, longest, _POINTS + 1)[1:]]


def _most_bands(space: Space) -> Candidates:
    """The best powers take time to find, and more draws are always better."""
    return space.noising_bands()[-1:]


def _powers(_: Family, space: Space) -> Iterator[Line]:
    if space.correlates and space.draws > 1:
        powers = np.linspace(0.0, 1.0, _POINTS + 1)[1:]
        yield [{"bands": space.draws, "gamma": float(power)} for power in powers]


LAMBDA_CGD = Family(
    "lambda_cgd",
    "cancels the share lambda of the previous step's noise, needs no buffers (arXiv:2601.22334)",
    lambda_cgd,
    _regenerated,
    _memories,
    sturdy=True,
    instant_steps=math.inf,
    paper="DP-λCGD",
    optional={"lambda": None, "objective": "rmse"},
    objectives=("rmse", "maxse", "training"),
    normalisable=True,
)
FRACTIONAL = Family(
    "fractional",
    "first `bands` terms of (1 - lambda x)^gamma as C^-1: between identity, lambda_cgd and bisr",
    fractional,
    _most_bands,
    _powers,
    sturdy=True,
    instant_steps=10_000,
    required=("bands",),
    optional={"gamma": None, "lambda": 1.0, "objective": "rmse"},
    normalisable=True,
)
