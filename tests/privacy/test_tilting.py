"""Importance sampling: exact identities, proven bounds, and certificates against plain simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest

from quell import strategy, workload
from quell.privacy import importance, side_by_side
from quell.privacy.bin_pair import BinPair, _pick
from quell.privacy.bins import Bins, bins_of
from quell.privacy.chain import ChainPair
from quell.privacy.orthogonal import FINE, orthogonal_delta
from quell.privacy.tilting import Mean, Tilt, candidates, log_kappa, sampling_free
from quell.schemes import BallsInBins, BMinSep
from tests.privacy.simulation import Patterns, simulated_delta

PROPOSALS = (
    Tilt(1.0),
    Tilt(2.3),
    Tilt(1.0, 1),
    Tilt(1.0, 4),
    Tilt(2.0, 2),
    Tilt(1.5, 0, 1.5),
    Tilt(1.0, 0, -1.0),
    Mean(2.0),
    Mean(-3.0),
)


def bin_pair(sigma=2.0, n=24, b=6, name="lambda_cgd", **parameters):
    scheme = BallsInBins(n, b)
    parameters = parameters or {"lambda": 0.7}
    built = strategy.build(name, workload.prefix(n), scheme.participation, **parameters)
    return BinPair(bins_of(built, scheme), sigma), built


def loose_pair():
    """Bins that overlap little: the weights of tuples differ."""
    return bin_pair(**{"lambda": 0.2})[0]


def chain_pair(sigma=2.0, n=12, b=3, rate=0.4):
    scheme = BMinSep(n, b, rate)
    built = strategy.build("bsr", workload.prefix(n), scheme.participation, bands=3)
    return ChainPair(built, scheme, sigma), built


def enumerated_constant(pair, tilt):
    """Z = E A over all tuples: the mean of exp⟨m_i, m_j⟩/σ² over pairs, the first pattern θ times."""
    gram = pair.bins.table / pair.sigma**2
    b, total = len(gram), 0.0
    for extras in combinations_with_replacement(range(b), tilt.extra):
        orders = math.factorial(tilt.extra) // math.prod(math.factorial(extras.count(each)) for each in set(extras))
        among = sum(gram[x, y] for x, y in combinations(extras, 2))
        total += orders * np.exp(among + tilt.theta * gram[:, list(extras)].sum(axis=1)).sum()
    return total / b ** (1 + tilt.extra)


def mean_weight(pair, proposals, power, draws=60_000, log_constants=None):
    """E_R[S^power·dQ/dR] for the even mixture of the proposals, and its standard error; 1 for powers 0 and 1."""
    counts = [draws] * len(proposals)
    drawn, _ = importance._draw(pair, "remove", -math.inf, proposals, counts, log_constants)
    shares = np.full(len(proposals), 1 / len(proposals))
    # With ε = −∞ the numerator of direction remove is S itself.
    loss = drawn.numerator
    values = np.exp(power * loss + drawn.auxiliary - importance._log_mixture(drawn.densities, shares))
    return values.mean(), values.std() / math.sqrt(len(values))


@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("proposal", PROPOSALS, ids=str)
def test_every_proposal_has_the_density_it_claims(proposal, power):
    """E_Q[1] = E_Q[P/Q] = 1, estimated through each proposal mixed with the untilted pair."""
    mean, error = mean_weight(bin_pair()[0], (proposal, Mean(0.0), Tilt(1.0)), power)
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.02


def accepted_weight(pair, tilt, power):
    """The same from accepted tuples, with the constant known by enumeration."""
    constants = np.log([enumerated_constant(pair, tilt), 1.0, 1.0])
    return mean_weight(pair, (tilt, Mean(0.0), Tilt(1.0)), power, log_constants=constants)


EXTENDED = [proposal for proposal in PROPOSALS if isinstance(proposal, Tilt) and proposal.extra]


@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("tilt", EXTENDED, ids=str)
def test_accepted_tuples_have_the_density_too(tilt, power):
    mean, error = accepted_weight(loose_pair(), tilt, power)
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.02


def test_accepting_every_tuple_breaks_that(monkeypatch):
    """Mutation: tuples as they come, without their weights."""

    def unweighed(self, tilt, count, random):
        return self._tuples(tilt, count, random)[0], np.zeros(count)

    monkeypatch.setattr(BinPair, "_accepted", unweighed)
    pair = loose_pair()
    off = [abs(mean - 1) / error for mean, error in (accepted_weight(pair, Tilt(1.0, 4), power) for power in (0, 1))]
    assert max(off) > 6


@pytest.mark.parametrize("tilt", EXTENDED, ids=str)
def test_constants_are_certified(tilt):
    pair = loose_pair()
    known = math.log(enumerated_constant(pair, tilt))
    mixture = importance.Mixture((tilt,), np.ones(1), np.array([known]), np.array([0.1]), 1.0, 1.0, 1.0, 1.0)
    (lower,), (upper,) = importance._constants(pair, "remove", mixture, [100_000], 1e-6)
    assert lower <= known + 1e-12
    assert known - 1e-12 <= upper < lower + 0.2
    assert upper <= pair.log_most(tilt)


@pytest.mark.parametrize("power", [0, 1])
@pytest.mark.parametrize("proposal", [Tilt(1.0), Tilt(1.8), Tilt(1.4, 0, 1.5), Mean(2.0), Mean(-3.0)], ids=str)
def test_the_same_for_the_chain_of_b_min_sep(proposal, power):
    mean, error = mean_weight(chain_pair()[0], (proposal, Mean(0.0), Tilt(1.0)), power)
    assert abs(mean - 1) < 4.5 * error
    assert error < 0.02


def test_the_moment_bound_bounds_the_moment():
    """E_Q S^c by enumeration of tuples."""
    pair, _ = bin_pair(sigma=2.5)
    gram = pair.bins.table / pair.sigma**2
    b = len(gram)
    for c in (2, 3, 4):
        tuples = np.stack(np.meshgrid(*[np.arange(b)] * c, indexing="ij"), axis=-1).reshape(-1, c)
        energy = sum(gram[tuples[:, i], tuples[:, j]] for i in range(c) for j in range(i))
        assert math.log(np.mean(np.exp(energy))) <= pair.log_most(Tilt(1.0, c - 1)) <= c * (c - 1) * pair.heaviest


@pytest.mark.parametrize("order", [1.0001, 1.5, 2.0, 7.0])
def test_kappa_is_the_largest_value(order):
    x = np.linspace(0, 40, 400_001)
    assert math.exp(log_kappa(order)) == pytest.approx(np.max(np.exp(-(order - 1) * x) * -np.expm1(-x)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.1, 0.7, 2.0])
@pytest.mark.parametrize("make", [bin_pair, chain_pair])
def test_weights_stay_below_their_bound_and_no_draw_bound_holds(make, epsilon):
    """`upper_mean` raises when a weight exceeds the bound; bounds without draws are never below the truth."""
    pair, built = make()
    patterns = Patterns.of_bins(24, 6) if make is bin_pair else Patterns.of_chain(12, 3, 0.4)
    simulated = simulated_delta(built.matrix(), patterns, pair.sigma, epsilon)
    scouted = importance.scout(pair, epsilon, 1e-5, 1000)
    certificate = importance.certify(pair, epsilon, 1e-5, scouted)
    for way, (delta, error) in simulated.items():
        assert sampling_free(pair, way, epsilon) >= delta - 4 * error
        assert certificate.upper >= delta - 4 * error
    top, error = max(simulated.values())
    assert certificate.lower - 4 * error <= top
    assert certificate.upper - certificate.lower < 0.35 * certificate.upper


def test_a_bound_that_is_too_small_does_not_go_unnoticed(monkeypatch):
    """Mutation: forget that a proposal has only its share of the mixture, and then some."""
    pair, _ = bin_pair()
    scouted = importance.scout(pair, 0.7, 1e-5, 1000)
    honest = importance._most
    monkeypatch.setattr(importance, "_most", lambda *arguments: 0.01 * honest(*arguments))
    with pytest.raises(AssertionError, match="exceeds its proven bound"):
        importance.certify(pair, 0.7, 1e-5, scouted)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda draws: {"auxiliary": 0.0 * draws.auxiliary},  # forget A
        lambda draws: {"loss": draws.loss + math.log(6)},  # forget the 1/b
        lambda draws: {"powers": 0.9 * draws.powers},
        lambda draws: {"drift": 1.1 * draws.drift},
    ],
)
def test_a_forgotten_factor_breaks_the_identities(monkeypatch, mutate):
    """Mutation: the identity E_Q[1] = E_Q[P/Q] = 1 must notice."""
    pair, _ = bin_pair()
    honest = BinPair.draw

    def wrong(self, *arguments):
        draws = honest(self, *arguments)
        return type(draws)(**{**vars(draws), **mutate(draws)})

    monkeypatch.setattr(BinPair, "draw", wrong)
    proposals = (Tilt(2.0, 2), Mean(1.0), Mean(0.0), Tilt(1.0))
    off = [abs(mean - 1) / error for mean, error in (mean_weight(pair, proposals, power) for power in (0, 1))]
    assert max(off) > 6


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    pair, _ = bin_pair()
    certificates = []
    for cpus in (1, 3):
        monkeypatch.setattr(side_by_side.os, "cpu_count", lambda cpus=cpus: cpus)
        monkeypatch.setattr(importance, "_CHUNK", dict.fromkeys(importance._CHUNK, 1 << 14))
        scouted = importance.scout(pair, 0.7, 1e-5, 1000)
        certificates.append(importance.certify(pair, 0.7, 1e-5, scouted))
    assert certificates[0] == certificates[1]


def extended_pair():
    """A pair whose certificate draws tuples."""
    pair, built = bin_pair(sigma=5.0, n=40, b=10, name="bisr", bands=3)
    scouted = importance.scout(pair, 0.8, 1e-5, 1000)
    assert any(isinstance(each, Tilt) and each.extra for each in scouted.pilots[0].mixture.proposals)
    return pair, built, scouted


def test_pilot_constants_and_certificate_use_different_draws(monkeypatch):
    """All that is chosen or bounded beforehand must be independent of what it is applied to."""
    pair, _, _ = extended_pair()
    asked, first = [], []

    def spy(*spawn, honest=importance._generator):
        asked.append(spawn)
        first.append(honest(*spawn).random())
        return honest(*spawn)

    monkeypatch.setattr(importance, "_generator", spy)
    scouted = importance.scout(pair, 0.8, 1e-5, 1000)
    importance.certify(pair, 0.8, 1e-5, scouted)
    assert {spawn[0] for spawn in asked} == {importance._PILOT, importance._CONSTANT, importance._CERTIFICATE}
    assert len(set(asked)) == len(set(first)) == len(asked)


def test_bounds_share_the_failure_probability(monkeypatch):
    """Those of the constants and of the mean, in each direction: the larger δ is understated by one of them only."""
    pair, _, scouted = extended_pair()
    spent = []

    def spy(values, most, failure, bet, honest=importance.upper_mean):
        spent.append(failure)
        return honest(values, most, failure, bet)

    monkeypatch.setattr(importance, "upper_mean", spy)
    for each, count in zip(scouted.pilots, scouted.draws, strict=True):
        spent.clear()
        importance._certify_direction(pair, each, 0.8, 1e-5, count)
        assert len(spent) >= 1 + (each.direction == "remove")
        assert sum(spent) <= 1e-5 * (1 + 1e-12)


def test_certificates_divide_by_no_less_than_the_constants(monkeypatch):
    """Z̄ ≥ Z is what makes the mean of X no smaller than δ."""
    pair, _, scouted = extended_pair()
    used = []

    def spy(pair, direction, epsilon, proposals, counts, log_constants, honest=importance._draw):
        used.extend((each, z) for each, z in zip(proposals, log_constants, strict=True) if getattr(each, "extra", 0))
        return honest(pair, direction, epsilon, proposals, counts, log_constants)

    monkeypatch.setattr(importance, "_draw", spy)
    importance._certify_direction(pair, scouted.pilots[0], 0.8, 1e-5, scouted.draws[0])
    assert used
    for tilt, log_constant in used:
        assert log_constant >= math.log(enumerated_constant(pair, tilt))


def test_a_certificate_holds_whatever_the_pilot_believes():
    """A pilot that is wrong about everything makes certificates wider, never too low."""
    pair, built, scouted = extended_pair()
    top, error = max(simulated_delta(built.matrix(), Patterns.of_bins(40, 10), pair.sigma, 0.8).values())
    assert error < 0.05 * top
    for mistake in (-1.0, 1.0):
        pilots = tuple(
            replace(
                each,
                estimate=each.estimate * math.exp(mistake),
                mixture=replace(
                    each.mixture,
                    log_constants=each.mixture.log_constants + mistake,
                    mean=each.mixture.mean * math.exp(mistake),
                    variance=each.mixture.variance * math.exp(2 * mistake),
                    most=each.mixture.most * math.exp(mistake),
                ),
            )
            for each in scouted.pilots
        )
        certificate = importance.certify(pair, 0.8, 1e-5, replace(scouted, pilots=pilots))
        assert certificate.lower - 4 * error <= top <= certificate.upper + 4 * error
        assert certificate.upper < 1.5 * top


@pytest.mark.slow
def test_certificates_fail_no_more_often_than_stated(monkeypatch):
    """Against the exact δ of bins that do not overlap, with few draws and a failure probability that can be seen."""
    pair, epsilon, failure = BinPair(Bins(np.eye(4)), 1.5), 0.3, 0.5
    exact, _ = orthogonal_delta([(1 / (2 * pair.sigma**2), 4)], "remove", epsilon, FINE)
    remove = importance.pilot(pair, "remove", epsilon, 1000, failure)
    assert any(isinstance(each, Tilt) and each.extra for each in remove.mixture.proposals)
    understated = 0
    for seed in range(100):
        monkeypatch.setattr(importance, "_SEED", seed)
        understated += importance._certify_direction(pair, remove, epsilon, failure, 300)[1] < exact
    assert 0 < understated < 100 * failure


@pytest.mark.slow
def test_an_event_that_the_pilot_never_meets_is_bounded_by_draws():
    """Direction add of many bins that do not overlap: what can be said without draws is far too much."""
    kernel = np.zeros(2000)
    kernel[0] = 1.0
    pair = BinPair(Bins(kernel), 0.4)
    scouted = importance.scout(pair, 2.0, 1e-3, 200)
    remove, add = scouted.pilots
    assert add.estimate == 0.0 < remove.estimate
    assert importance.certify(pair, 2.0, 1e-3, scouted).upper < 1.5 * remove.estimate < 0.01 * scouted.free


def test_candidates_start_with_one_that_proves_a_bound():
    for sigma in (0.5, 2.0, 20.0):
        for epsilon in (0.05, 1.0, 12.0):
            pair = BinPair(Bins(np.eye(5) * 3 + 1.0), sigma)
            assert isinstance(candidates(pair, "remove", epsilon)[0], Tilt)
            assert candidates(pair, "add", epsilon)[0].shift < 0


def test_extras_with_a_shift_have_no_bound_and_cannot_be_written():
    with pytest.raises(ValueError, match="extras"):
        Tilt(1.0, 2, 0.5)


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 30, 1000])
def test_bins_are_picked_where_the_running_sum_reaches_a_share_of_it(bins):
    """Also for a share of 1, where rounding may keep the last block below what is left of the goal."""
    random, size = np.random.default_rng(0), math.isqrt(bins - 1) + 1
    blocks = np.zeros((2000, -(-bins // size), size))
    blocks.reshape(2000, -1)[:, :bins] = random.random((2000, bins))
    shares = np.where(random.random(2000) < 0.5, random.random(2000), 1.0)
    total, picked = _pick(blocks, shares)
    running = np.cumsum(blocks.reshape(2000, -1), axis=1)
    np.testing.assert_allclose(total, running[:, -1], rtol=1e-12)
    before = np.concatenate([np.zeros((2000, 1)), running], axis=1)[np.arange(2000), picked]
    assert np.all(before <= shares * total * (1 + 1e-12))
    assert np.all(running[np.arange(2000), picked] >= shares * total * (1 - 1e-12))
