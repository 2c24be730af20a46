"""Random mechanisms priced by Quell, against the δ that they truly have (`attacks.truth`).

Any family under any scheme, any optimizer. A claim is a noise level for (ε, δ), an ε for a noise level, or a δ; it is
false where the true δ at the claimed ε is above the claimed δ. A δ that was sampled counts five standard errors lower,
and a suspicion has to come up again with fresh draws, four times as many: a full run accuses honest claims with a
probability below one in a million.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attacks import truth
from attacks.cases import build, random_family, random_parameters, random_workload, released_matrix
from attacks.outcome import Outcome, Trial, by_group, spread
from quell import privacy
from quell.errors import QuellError
from quell.participation import Participation
from quell.privacy import Guarantee
from quell.schemes import BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme
from quell.strategy import Strategy

Matrix = np.ndarray[Any, np.dtype[np.float64]]
# A case takes about 0.07, 3.4, 1, 3 and 5 seconds of one core: 12 minutes for 2,000, most for the 220 amplified.
SHARES = {"cyclic": 0.89, "balls_in_bins": 0.05, "cyclic_poisson": 0.03, "poisson": 0.02, "b_min_sep": 0.01}
# schemes that only take strategies with few bands: no other family is worth a try
BANDED = ("identity", "bsr", "band_toeplitz", "band", "diagonal")
INSTEAD = {"poisson": ("identity", "diagonal"), "cyclic_poisson": BANDED, "b_min_sep": BANDED}
_TRIES = 40  # configurations drawn until one goes together


@dataclass(frozen=True)
class Claim:
    """What Quell says about a strategy, and a name for people."""

    strategy: Strategy
    scheme: Scheme
    guarantee: Guarantee
    kind: str

    def __str__(self) -> str:
        said = self.guarantee
        return (
            f"{self.kind} of {self.strategy!r} under {self.scheme!r}: noise {said.noise_multiplier:.6g} is called "
            f"({said.epsilon:.6g}, {said.delta:.6g})-DP"
        )


def attack(count: int, seed: int, workers: int = 1, shares: Mapping[str, float] = SHARES) -> list[Outcome]:
    """So many priced configurations, divided between the schemes by `shares`; one row per scheme."""
    slow_first = sorted(shares, key=lambda name: shares[name])  # so that no worker is left with them at the end
    names = [name for name in slow_first for _ in range(round(shares[name] * count))]
    cases = [(name, seed + number) for number, name in enumerate(names)]
    return by_group("random configurations", spread(one, cases, workers))


def one(case: tuple[str, int]) -> Trial:
    """Price one random configuration and compare it with the truth."""
    scheme_name, seed = case
    random = np.random.default_rng([seed, 14])
    for _ in range(_TRIES):
        described = ""
        try:
            scheme = random_scheme(random, scheme_name)
            family = random_family(random, INSTEAD.get(scheme_name))
            parameters = random_parameters(random, family, min(8, scheme.separation))
            described = f"{family} {parameters} under {scheme!r}"
            claim = priced(random, scheme, family, parameters)
        except QuellError:
            continue
        except Exception as problem:
            return Trial(scheme_name, flaw=f"{described} raised {type(problem).__name__}: {problem}")
        return judged(claim, seed)
    return Trial(scheme_name, refused=True)


def random_scheme(random: np.random.Generator, name: str) -> Scheme:
    steps = int(random.integers(8, 61))
    match name:
        case "cyclic":
            separation = int(random.integers(1, steps + 1))
            return Cyclic(steps, separation, participations=int(random.integers(1, 5)) if random.random() < 0.3 else 0)
        case "balls_in_bins":
            return BallsInBins(steps, int(random.integers(2, 21)) if steps > 20 else int(random.integers(2, 8)))
        case "poisson":
            return Poisson(steps, float(random.uniform(0.01, 0.6)))
        case "cyclic_poisson":
            return CyclicPoisson(steps, int(random.integers(2, 9)), float(random.uniform(0.05, 0.9)))
    return BMinSep(int(random.integers(8, 17)), int(random.integers(2, 6)), float(random.uniform(0.05, 0.9)))


def priced(random: np.random.Generator, scheme: Scheme, family: str, parameters: dict[str, Any]) -> Claim:
    """One claim about a random promise."""
    chosen = build(family, random_workload(random, scheme.steps), scheme.participation, parameters)
    epsilon, delta = float(np.exp(random.uniform(np.log(0.2), np.log(8)))), float(10 ** random.uniform(-5, -2))
    most = 0.35 if isinstance(scheme, Cyclic) else 0.1  # finding a certified noise level takes seconds there
    draw = random.random()
    if draw < most:
        return Claim(chosen, scheme, privacy.calibrate(chosen, scheme, epsilon, delta), "noise")
    sigma = about(released_matrix(chosen), scheme, epsilon, delta, random)
    if draw < 2 * most:
        return Claim(chosen, scheme, privacy.epsilon(chosen, scheme, sigma, delta), "epsilon")
    return Claim(chosen, scheme, privacy.delta(chosen, scheme, sigma, epsilon), "delta")


def about(matrix: Matrix, scheme: Scheme, epsilon: float, delta: float, random: np.random.Generator) -> float:
    """A noise level whose δ is within reach of the measurements; nothing rests on it."""
    low, high = 1e-2, 1e3  # standard deviations that a Gaussian may move at (ε, δ)
    for _ in range(40):
        move = (low * high) ** 0.5
        low, high = (low, move) if truth.gaussian_delta(move, epsilon) > delta else (move, high)
    jitter = float(random.uniform(0.85, 1.2))
    if isinstance(scheme, Poisson | CyclicPoisson):  # by the central limit theorem
        rounds = -(-scheme.steps // scheme.groups)
        column = float(np.linalg.norm(matrix, axis=0).max())
        return float(column * jitter * max(0.5, 1 / math.log1p(low**2 / (scheme.rate**2 * rounds)) ** 0.5))
    move = truth.worst_move(matrix, scheme.separation, scheme.participation.count, random)
    return jitter * move / low * {"cyclic": 1.0, "balls_in_bins": 0.85}.get(scheme.name, 0.7)


def judged(claim: Claim, seed: int) -> Trial:
    """The claim against the true δ."""
    said = claim.guarantee
    measured = true_delta(claim.strategy, claim.scheme, said.noise_multiplier, said.epsilon, seed)
    if measured.lower > said.delta and not isinstance(claim.scheme, Cyclic | Poisson | CyclicPoisson):
        measured = true_delta(claim.strategy, claim.scheme, said.noise_multiplier, said.epsilon, seed + 10**9, 4.0)
    ratio = measured.lower / said.delta if said.delta else float(measured.lower > 0) * 2
    if not ratio <= 1:
        return Trial(claim.scheme.name, ratio, f"{claim}, but delta is {measured.delta:.4g}")
    return Trial(claim.scheme.name, max(0.0, ratio))


def true_delta(
    chosen: Strategy, scheme: Scheme, sigma: float, epsilon: float, seed: int, effort: float = 1.0
) -> truth.Measured:
    """The δ that the mechanism has at this ε."""
    matrix = released_matrix(chosen)
    participation: Participation = scheme.participation
    match scheme:
        case Cyclic():
            return truth.fixed_delta(matrix, participation.separation, participation.count, sigma, epsilon, seed)
        case Poisson() | CyclicPoisson():  # who is in which group counts as known: the worst group
            columns = np.linalg.norm(matrix, axis=0) / sigma
            groups = [columns[group :: scheme.groups] for group in range(scheme.groups)]
            worst = max(groups, key=lambda moves: float(np.sum(moves**2)))
            return truth.coin_delta(worst, scheme.rate, epsilon)
    rows, chances = truth.patterns(scheme)
    return truth.mixture_delta(rows @ matrix.T, chances, sigma, epsilon, seed, effort)
