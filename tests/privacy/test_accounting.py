"""Guarantees under every scheme: against simulation of the real sampler, monotone, paired by type, and breakable."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quell import privacy, strategy, workload
from quell.errors import QuellError
from quell.privacy import accountant, bins, gaussian_delta, importance
from quell.privacy import mixture as balls_in_bins
from quell.privacy.accountant import FAILURE_SHARE, round_up
from quell.schemes import BallsInBins, BMinSep, Cyclic, CyclicPoisson, Poisson, Scheme
from quell.strategy.structure import ToeplitzStrategy
from tests.privacy.simulation import Patterns, agrees, simulated_delta

N, B, SIGMA, EPSILON = 12, 4, 2.0, 0.8


def build(scheme: Scheme, name="bsr", **parameters):
    parameters = parameters or ({"bands": 3} if name == "bsr" else {})
    return strategy.build(name, workload.prefix(scheme.steps), scheme.participation, **parameters)


CASES = [
    (BallsInBins(N, B), "bsr", {"bands": 3}),
    (BallsInBins(N, B), "bisr", {"bands": 2}),
    (BallsInBins(N, B), "lambda_cgd", {"lambda": 0.9, "column_normalise": True}),
    (BallsInBins(N, B), "tree", {}),
    (BallsInBins(N, B), "identity", {}),
    (BallsInBins(N + 2, B), "square_root", {}),
    (Poisson(8, 0.2), "identity", {}),
    (CyclicPoisson(N, 3, 0.3), "bsr", {"bands": 3}),
    (BMinSep(N, 3, 0.3), "bsr", {"bands": 3}),
    (BMinSep(N, 4, 0.6), "bsr", {"bands": 2, "column_normalise": True}),
]


@pytest.mark.parametrize(("scheme", "name", "parameters"), CASES, ids=lambda value: str(value)[:40])
def test_a_guarantee_covers_what_its_own_sampler_does(scheme, name, parameters):
    """δ of the mechanism as run with the scheme's batches, patterns counted over 200,000 examples."""
    built = build(scheme, name, **parameters)
    promised = privacy.delta(built, scheme, SIGMA, EPSILON)
    simulated = simulated_delta(built.matrix(), Patterns.of_sampler(scheme), SIGMA, EPSILON)
    assert promised.sampling == scheme.name
    assert promised.adjacency == "add-remove"
    assert promised.bracket[1] <= promised.delta
    if scheme.name == "cyclic_poisson":  # one group is as bad as all: the accountant's group may be the fullest
        assert promised.delta >= max(simulated.values())[0] - 4 * max(simulated.values())[1]
    else:
        assert agrees(promised.bracket, simulated)


@pytest.mark.slow
def test_calibration_certification_and_both_inverses_agree():
    scheme = BallsInBins(24, 6)
    built = build(scheme, "bisr", bands=4)
    found = privacy.calibrate(built, scheme, 1.0, 1e-4)
    assert found.failure_probability == pytest.approx(1e-6)
    assert found.bracket[1] <= 1e-4 * (1 - FAILURE_SHARE)
    assert found.noise_multiplier == round_up(found.noise_multiplier)
    again = privacy.certify(built, scheme, found.noise_multiplier, 1.0, 1e-4)
    assert again.noise_multiplier == found.noise_multiplier
    assert privacy.delta(built, scheme, found.noise_multiplier, 1.0).delta <= 1e-4 * 1.03
    assert privacy.epsilon(built, scheme, found.noise_multiplier, 1e-4).epsilon == pytest.approx(1.0, rel=0.03)
    about = privacy.estimate(built, scheme, 1.0, 1e-4)
    assert about.noise_multiplier < found.noise_multiplier < about.noise_multiplier * 1.015
    unamplified = privacy.calibrate(built, Cyclic(24, 6), 1.0, 1e-4)
    assert found.noise_multiplier < unamplified.noise_multiplier
    assert privacy.calibrate(built, scheme, 1.0, 1e-4) == found  # seeds are fixed
    with pytest.raises(QuellError, match="is not certified to be"):
        privacy.certify(built, scheme, found.noise_multiplier * 0.97, 1.0, 1e-4)


@pytest.mark.parametrize("scheme", [BallsInBins(10, 1), BMinSep(10, 1, 1.0)])
def test_one_bin_is_the_gaussian_mechanism(scheme):
    built = build(scheme, "bisr", bands=3)
    plain = Cyclic(10, 1)
    assert privacy.calibrate(built, scheme, 2.0, 1e-5).noise_multiplier == pytest.approx(
        privacy.calibrate(built, plain, 2.0, 1e-5).noise_multiplier, rel=6e-4
    )
    delta = privacy.delta(built, scheme, 3.0, 2.0)
    assert delta.failure_probability == 0
    assert delta.delta == pytest.approx(privacy.delta(built, plain, 3.0, 2.0).delta, rel=1e-9)


@pytest.mark.slow
def test_full_rate_b_min_sep_is_balls_in_bins_and_poisson_is_one_group():
    built = build(BallsInBins(N, B))
    same = [privacy.delta(built, scheme, SIGMA, EPSILON).bracket for scheme in (BallsInBins(N, B), BMinSep(N, B, 1.0))]
    assert same[0] == same[1]
    chain = ChainAsBins().bracket()
    assert agrees(chain, {"both": (sum(same[0]) / 2, 0.02 * same[0][1])})
    identity = build(Poisson(9, 0.2), "identity")
    one, group = (privacy.delta(identity, scheme, 1.0, 1.0) for scheme in (Poisson(9, 0.2), CyclicPoisson(9, 1, 0.2)))
    assert one.delta == group.delta


class ChainAsBins:
    """The recursion of b-min-sep at rate 1, which the accountant itself would hand to balls in bins."""

    def bracket(self):
        from quell.privacy.chain import ChainAccountant

        scheme = BMinSep(N, B, 1.0)
        object.__setattr__(scheme, "rate", 1 - 1e-12)
        certificate = ChainAccountant(build(scheme), scheme, 0.0).certify(SIGMA, EPSILON, 1e-5)
        return certificate.lower, certificate.upper


@pytest.mark.slow
def test_monotone_in_noise_epsilon_and_epochs():
    """Certificates use the same draws throughout, so they are monotone far below their width."""
    scheme = BallsInBins(24, 6)
    built = build(scheme, "lambda_cgd", **{"lambda": 0.8})
    upper = lambda built, scheme, sigma, epsilon: privacy.delta(built, scheme, sigma, epsilon).delta  # noqa: E731
    by_noise = [upper(built, scheme, sigma, 1.0) for sigma in (2.0, 2.5, 3.2)]
    by_epsilon = [upper(built, scheme, 2.5, epsilon) for epsilon in (0.5, 1.0, 2.0)]
    by_epochs = []
    for steps in (6, 12, 24, 27):
        longer = BallsInBins(steps, 6)
        by_epochs.append(upper(build(longer, "lambda_cgd", **{"lambda": 0.8}), longer, 2.5, 1.0))
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    assert by_epochs == sorted(by_epochs)


@pytest.mark.slow
def test_epsilon_does_not_depend_on_the_learning_rate():
    scheme = BallsInBins(20, 5)
    rates = workload.schedule("cosine", 20)
    tasks = [workload.sgd(20, 0.9, 1.0, scale) for scale in (None, 1000 * rates)]
    noise = {
        privacy.calibrate(
            strategy.build("bisr", task, scheme.participation, bands=3), scheme, 2.0, 1e-3
        ).noise_multiplier
        for task in tasks
    }
    assert len(noise) == 1


@pytest.mark.slow
def test_both_directions_are_estimated_and_the_larger_is_reported():
    scheme = BallsInBins(40, 20)
    together = build(scheme, "lambda_cgd", **{"lambda": 0.99})
    pair = balls_in_bins.BinPair(bins.bins_of(together, scheme), 40.0)
    found = {way: importance.pilot(pair, way, 0.3, 4000, 1e-6) for way in ("remove", "add")}
    simulated = simulated_delta(together.matrix(), Patterns.of_bins(40, 20), 40.0, 0.3)
    for way, (delta, error) in simulated.items():
        assert abs(found[way].estimate - delta) < 4.5 * (error + found[way].error)
    upper = balls_in_bins.BinAccountant.of(together, scheme).certify(40.0, 0.3, 1e-5).upper
    assert upper > max(each.estimate for each in found.values())


@pytest.mark.parametrize(
    ("scheme", "name", "parameters", "message"),
    [
        (
            Poisson(N, 0.1),
            "bsr",
            {"bands": 3},
            r"3 bands in C, but poisson .* \(1 band\) only: use balls_in_bins.* at least 3 groups",
        ),
        (Poisson(N, 0.1), "bisr", {"bands": 3}, "poisson .* only: use balls_in_bins, which takes any C >= 0"),
        (
            CyclicPoisson(N, 2, 0.1),
            "bsr",
            {"bands": 3},
            "priced for at most 2 bands: use balls_in_bins.* at least 3 groups",
        ),
        (CyclicPoisson(N, 2, 0.1), "tree", {}, "priced for at most 2 bands"),
        (BMinSep(N, 2, 0.1), "bsr", {"bands": 3}, "priced for at most 2 bands: use balls_in_bins"),
        (BMinSep(N, 2, 0.1), "bisr", {"bands": 2}, "priced for at most 2 bands: use balls_in_bins"),
    ],
)
def test_wrong_combinations_say_which_are_valid(scheme, name, parameters, message):
    built = build(scheme, name, **parameters)
    for ask in (
        lambda: privacy.calibrate(built, scheme, 1.0, 1e-5),
        lambda: privacy.delta(built, scheme, 1.0, 1.0),
        lambda: privacy.estimate(built, scheme, 1.0, 1e-5),
    ):
        with pytest.raises(QuellError, match=message) as caught:
            ask()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", [BallsInBins(N, B), Poisson(N, 0.1), CyclicPoisson(N, 4, 0.1), BMinSep(N, 4, 0.5)])
def test_a_strategy_of_another_length_is_refused(scheme):
    built = build(BallsInBins(N + 1, B))
    with pytest.raises(QuellError, match="the strategy has 13 steps but the sampling 12"):
        privacy.calibrate(built, scheme, 1.0, 1e-5)


def test_an_estimate_is_not_a_guarantee():
    scheme = BallsInBins(N, B)
    about = privacy.estimate(build(scheme), scheme, 1.0, 1e-3)
    assert not isinstance(about, privacy.Guarantee)
    assert not about.certified
    shared = {field.name for field in dataclasses.fields(privacy.Guarantee)} & {"bracket", "method", "sensitivity"}
    assert not shared & {field.name for field in dataclasses.fields(about)}


def test_negative_strategies_and_schemes_without_accountant_are_refused():
    odd = ToeplitzStrategy("odd", N, np.array([1.0, -0.2]))
    for scheme in (BallsInBins(N, B), BMinSep(N, B, 0.5)):
        with pytest.raises(QuellError, match="negative entries in C"):
            privacy.calibrate(odd, scheme, 1.0, 1e-5)
    assert privacy.calibrate(odd, CyclicPoisson(N, 2, 0.1), 1.0, 1e-5).noise_multiplier > 0  # signs do not matter there
    with pytest.raises(QuellError, match="no accountant prices"):
        privacy.calibrate(odd, "balls_in_bins", 1.0, 1e-5)


@pytest.mark.slow
def test_comparing_more_certificates_costs_a_little_noise_not_soundness():
    scheme = BallsInBins(24, 6)
    built = build(scheme, "bisr", bands=4)
    one, many = (privacy.calibrate(built, scheme, 1.0, 1e-4, comparisons=m).noise_multiplier for m in (1, 1000))
    assert one <= many <= one * 1.01
    allowed, failure = accountant._budget(scheme.accountant(built), 1e-4, comparisons=1000)
    assert allowed + failure * 1000 * len(accountant._RUNGS) <= 1e-4 * (1 + 1e-12)  # all that `calibrate` may look at
    wide, wider = (privacy.delta(built, scheme, 1.0, 1.0, comparisons=m) for m in (1, 10**6))  # by draws, both
    assert wide.bracket[1] < wider.bracket[1]
    for found in (wide, wider):
        assert found.failure_probability > 0
        assert found.delta >= found.bracket[1] + found.failure_probability


@pytest.mark.slow
class TestMutations:
    """Break the accountant or swap the sampler: the comparison with the real sampler must notice."""

    steps, sigma = 8, 1.6
    scheme = BallsInBins(steps, B)

    def check(self, sampled=None, name="bisr", **parameters):
        built = build(self.scheme, name, **(parameters or ({"bands": 2} if name == "bisr" else {})))
        bracket = self.scheme.account(built).certify(self.sigma, EPSILON, 1e-5)
        patterns = sampled or Patterns.of_bins(self.steps, B)
        simulated = simulated_delta(built.matrix(), patterns, self.sigma, EPSILON)
        return agrees((bracket.lower, bracket.upper), simulated)

    def test_unbroken(self):
        assert self.check()

    @pytest.mark.parametrize(
        "other", [Poisson(8, 1 / B), CyclicPoisson(8, B, 1.0), BMinSep(8, B, 0.3), BMinSep(8, 2, 0.1)]
    )
    def test_batches_of_another_scheme(self, other):
        patterns = Patterns.of_sampler(other)
        if other == CyclicPoisson(8, B, 1.0):
            assert self.check(patterns)  # sampling every member of a random group *is* balls in bins
        else:
            assert not self.check(patterns)

    def test_bins_drawn_again_every_epoch(self, random):
        """Random allocation: priced as balls in bins it would be wrong, and no scheme of Quell produces it."""
        epochs = self.steps // B
        bins_ = random.integers(0, B, (200_000, epochs))
        rows = np.zeros((len(bins_), self.steps))
        for epoch in range(epochs):
            rows[np.arange(len(bins_)), epoch * B + bins_[:, epoch]] = 1
        rows, counts = np.unique(rows, axis=0, return_counts=True)
        assert self.check(name="diagonal")
        assert not self.check(Patterns(rows, counts / counts.sum()), name="diagonal")

    def test_dropped_cross_epoch_terms(self, monkeypatch):
        honest = balls_in_bins.bins_of

        def wrong(built, sampling):
            matrix, b = built.matrix(), sampling.separation
            gram = sum(matrix[:, s : s + b].T @ matrix[:, s : s + b] for s in range(0, built.steps, b))
            return dataclasses.replace(honest(built, sampling), table=gram)

        monkeypatch.setattr(balls_in_bins, "bins_of", wrong)
        assert not self.check()

    def test_forgotten_left_over_epoch(self, monkeypatch):
        honest = balls_in_bins.bins_of
        shorter = BallsInBins(self.steps - B, B)
        monkeypatch.setattr(balls_in_bins, "bins_of", lambda _, __: honest(build(shorter, "bisr", bands=2), shorter))
        assert not self.check()

    @pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
    def test_forgotten_factor(self, monkeypatch, factor):
        honest = balls_in_bins.bins_of
        monkeypatch.setattr(
            balls_in_bins,
            "bins_of",
            lambda *which: dataclasses.replace(honest(*which), table=factor * honest(*which).table),
        )
        assert not self.check()

    def test_sensitivity_counted_twice(self, monkeypatch):
        monkeypatch.setattr(balls_in_bins.BinPair, "__init__", _scaled_init)
        with pytest.raises(AssertionError, match="draws contradict the bounds"):
            self.check()

    def test_one_direction_only(self, monkeypatch):
        honest, scheme = importance.pilot, BallsInBins(20, 10)

        def wrong(pair, direction, *rest):
            found = honest(pair, direction, *rest)
            return found if direction == "add" else dataclasses.replace(found, estimate=0.0, mixture=None)

        monkeypatch.setattr(importance, "pilot", wrong)
        monkeypatch.setattr(importance, "_certify_direction", _none_is_zero(importance._certify_direction))
        built = build(scheme, "lambda_cgd", **{"lambda": 0.2})
        with pytest.raises(AssertionError, match="draws contradict the bounds"):
            balls_in_bins.BinAccountant.of(built, scheme).certify(1.0, 1.0, 1e-5)


def _scaled_init(self, bins_, sigma):
    object.__setattr__(self, "bins", bins_)
    object.__setattr__(self, "sigma", sigma * float(np.sqrt(bins_.energies.max())))


def _none_is_zero(honest):
    return lambda pair, pilot, *rest: (0.0, 0.0, 0) if pilot.mixture is None else honest(pair, pilot, *rest)


def test_the_gaussian_bound_is_never_exceeded():
    scheme = BallsInBins(N, B)
    for sigma in (0.05, 1.0, 50.0):
        found = privacy.delta(build(scheme), scheme, sigma, 1.0)
        assert found.delta <= gaussian_delta(sigma / found.sensitivity.value, 1.0) * (1 + 1e-9) + 1e-300


def test_numbers_beyond_float64_are_refused_in_words_and_no_noise_is_needed_for_little_privacy():
    scheme, task = BallsInBins(40, 8), workload.prefix(40)
    chosen = strategy.build("lambda_cgd", task, scheme.participation, **{"lambda": 0.9})
    for epsilon, delta in ((720.0, 1e-5), (1.0, 1e-300)):
        with pytest.raises(QuellError, match="use cyclic sampling"):
            privacy.calibrate(chosen, scheme, epsilon, delta)
    assert privacy.epsilon(chosen, scheme, 1e4, 1e-2).epsilon == 0.0
    with pytest.raises(QuellError, match="epsilon=-1 must not be negative"):
        privacy.delta(chosen, scheme, 3.0, -1.0)


def test_a_claim_is_checked_with_the_confidence_of_a_calibration():
    """Otherwise somebody could lower the noise by hand until the check refuses."""
    scheme, task = BallsInBins(40, 8), workload.prefix(40)
    chosen = strategy.build("lambda_cgd", task, scheme.participation, **{"lambda": 0.9})
    found = privacy.calibrate(chosen, scheme, 2.0, 1e-5, comparisons=3)
    again = privacy.certify(chosen, scheme, found.noise_multiplier, 2.0, 1e-5, comparisons=3)
    assert again.bracket == found.bracket


@pytest.mark.parametrize("scheme", [BallsInBins(N, B), BMinSep(N, B, 0.5)])
@pytest.mark.parametrize(("sigma", "epsilon"), [(1e3, 0.5), (30.0, 5.0), (3.0, 100.0)])
def test_gaussian_noise_is_never_pure(scheme, sigma, epsilon):
    """P/Q is unbounded, so no ε has δ = 0; bounds without draws that underflow must not say so."""
    found = privacy.delta(build(scheme), scheme, sigma, epsilon)
    assert found.delta > 0.0
    assert found.bracket[1] > 0.0


@pytest.mark.parametrize("slope", [-60.0, -20.0, -2.0])
@pytest.mark.parametrize("start", [0.3, 2.9, 30.0])
def test_secants_cross_a_plateau_and_stop_at_the_most(start, slope):
    def falling(x: float) -> tuple[float, float]:
        return min(1.0, (x / 2) ** -30), 0.0

    for most in (100.0, 2.5):
        found, _, _ = accountant.secants(falling, start, 1e-5, slope, most, rounds=12, close=0.01)
        assert found == pytest.approx(min(2 * 1e-5 ** (-1 / 30), most), rel=1e-6)
