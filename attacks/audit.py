"""The white-box audit: the best distinguisher against Quell's own batches and noise, example by example.

Every example is its own experiment: its gradient is one clip norm along a coordinate of its own, so that one run over
m examples is m independent runs of the mechanism, with the real sampler and the real noise generator. The attacker
knows C, σ and the scheme, and uses the exact likelihood ratio. On one half of the outcomes a threshold is chosen, on
the other half an ε is read off that holds with confidence 1 − 10⁻⁶ (Clopper–Pearson). The ratio is that ε over the
certified one; above 1 the promise is broken.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import logsumexp
from scipy.stats import beta

from attacks import truth
from attacks.outcome import Outcome, Trial, by_group, spread
from attacks.pricing import BANDED
from quell import privacy, strategy, workload
from quell.noise import Key, NoiseSpec, NoiseStream
from quell.schemes import BallsInBins, Batches, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme
from quell.strategy import Strategy

CONFIDENCE = 1e-6 / 2  # for each of the two probabilities
_PARAMETERS: dict[str, dict[str, Any]] = {
    "identity": {}, "bisr": {"bands": 3}, "bsr": {"bands": 2}, "blt": {"buffers": 1}, "lambda_cgd": {"lambda": 0.5},
    "band_toeplitz": {"bands": 2}, "square_root": {}, "tree": {}, "diagonal": {}, "band": {"bands": 2},
}  # fmt: skip
FAMILIES = {
    "cyclic": tuple(_PARAMETERS),
    "balls_in_bins": ("identity", "bisr", "bsr", "lambda_cgd", "square_root", "tree"),
    "poisson": ("identity",),
    "cyclic_poisson": BANDED,
    "b_min_sep": BANDED,
}


def attack(count: int, seed: int, workers: int = 1, examples: int = 1_000_000) -> list[Outcome]:
    """So many audits, the schemes in turn; one row per scheme."""
    names = list(FAMILIES)
    cases = [(names[number % len(names)], seed + number, examples) for number in range(count)]
    return by_group("white-box audit", spread(one, cases, workers))


def one(case: tuple[str, int, int]) -> Trial:
    name, seed, examples = case
    random = np.random.default_rng([seed, 6])
    family = str(random.choice(FAMILIES[name]))
    scheme = _scheme(name, random)
    chosen = strategy.build(family, workload.prefix(scheme.steps), scheme.participation, **_PARAMETERS[family])
    epsilon, delta = float(random.uniform(0.5, 3)), 1e-2
    sigma = privacy.calibrate(chosen, scheme, epsilon, delta).noise_multiplier
    present = outcomes(chosen, scheme, sigma, examples, taking_part=True)
    absent = outcomes(chosen, scheme, sigma, examples, taking_part=False)
    found = max(empirical_epsilon(present, absent, delta), empirical_epsilon(-absent, -present, delta))
    label = f"{chosen!r} under {scheme!r} with noise {sigma:.5g}"
    if found > epsilon:
        return Trial(
            name, found / epsilon, f"{label} is called epsilon={epsilon:.4g}, but an attacker reaches {found:.4g}"
        )
    return Trial(name, found / epsilon)


def _scheme(name: str, random: np.random.Generator) -> Scheme:
    steps = int(random.integers(8, 17))
    match name:
        case "cyclic":
            return Cyclic(steps, int(random.integers(2, 6)))
        case "balls_in_bins":
            return BallsInBins(steps, int(random.integers(2, 5)))
        case "poisson":
            return Poisson(steps, float(random.uniform(0.1, 0.5)))
        case "cyclic_poisson":
            return CyclicPoisson(steps, 2, float(random.uniform(0.2, 0.8)))
    return BMinSep(min(steps, 12), 3, float(random.uniform(0.2, 0.8)))


def outcomes(chosen: Strategy, scheme: Scheme, sigma: float, examples: int, taking_part: bool) -> truth.Array:
    """(examples,) the log-likelihood ratio of "was there" to "was not", for every example of one run."""
    key = Key.generate()
    stream = NoiseStream(NoiseSpec(chosen.recurrence, scheme.steps, sigma), [examples], key=key)
    released = np.zeros((scheme.steps, examples), np.float32)
    patterns = np.zeros((scheme.steps, examples), bool)
    for step, batch in enumerate(Batches(scheme, examples, key.derive("audit"))):
        patterns[step, batch] = True
        if taking_part:
            released[step, batch] = 1.0
        stream.add_([released[step]])
    matrix = chosen.matrix()
    seen = (matrix @ released.astype(np.float64)).T / sigma
    return _log_ratio(seen, matrix / sigma, scheme, patterns)


def _log_ratio(seen: truth.Array, matrix: truth.Array, scheme: Scheme, patterns: Any) -> truth.Array:
    match scheme:
        case Cyclic():  # batches are fixed, so the attacker knows them: only the worst of them counts
            rows, _ = truth.bin_patterns(scheme.steps, scheme.separation)
            moves = rows @ matrix.T
            worst = int(np.argmax(np.sum(moves**2, axis=1)))
            mine = seen[patterns[worst]]
            return np.asarray(mine @ moves[worst] - 0.5 * moves[worst] @ moves[worst])
        case Poisson() | CyclicPoisson():
            once = seen @ matrix - 0.5 * np.sum(matrix**2, axis=0)  # columns of a group do not overlap
            coins = np.logaddexp(math.log1p(-scheme.rate), math.log(scheme.rate) + once)
            groups = np.array([coins[:, group :: scheme.groups].sum(axis=1) for group in range(scheme.groups)])
            return np.asarray(logsumexp(groups, axis=0) - math.log(scheme.groups))
    rows, chances = truth.patterns(scheme)
    return truth.log_ratio(seen, rows @ matrix.T, np.log(chances))


def empirical_epsilon(likely: truth.Array, unlikely: truth.Array, delta: float) -> float:
    """The ε that these scores prove: those of `likely` are larger."""
    half = min(len(likely), len(unlikely)) // 2
    candidates = np.quantile(likely[:half], 1 - np.geomspace(1.2 * delta, 0.5, 40))
    bounds = [rate_bound(likely[:half] > t, unlikely[:half] > t, delta, 1e-2) for t in candidates]
    threshold = candidates[int(np.argmax(bounds))]
    return max(0.0, rate_bound(likely[half:] > threshold, unlikely[half:] > threshold, delta, CONFIDENCE))


def rate_bound(hits: truth.Array, alarms: truth.Array, delta: float, failure: float) -> float:
    """ln((P − δ)/Q) with the rate of hits P bounded from below and that of false alarms Q from above."""
    k, m, j, n = int(hits.sum()), len(hits), int(alarms.sum()), len(alarms)
    lower = float(beta.ppf(failure, k, m - k + 1)) if k else 0.0
    upper = float(beta.ppf(1 - failure, j + 1, n - j)) if j < n else 1.0
    return math.log((lower - delta) / upper) if lower > delta else -math.inf
