"""Batches: what each scheme promises about them, that every worker sees the same, and that nothing leaks the key."""

from __future__ import annotations

import dataclasses
import itertools
import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quell.errors import QuellError
from quell.schemes import (
    SCHEMES,
    BallsInBins,
    Batches,
    BMinSep,
    Cyclic,
    CyclicPoisson,
    Poisson,
    randomness,
    scheme,
)
from quell.schemes.randomness import coin_flips, grouped, permuted, words

KEY = bytes(range(32))
ALL = [
    Cyclic(23, 5),
    Cyclic(23, 5, shuffle=True),
    BallsInBins(23, 5),
    Poisson(23, 0.1),
    CyclicPoisson(23, 5, 0.4),
    BMinSep(23, 5, 0.3),
]


def table(chosen, examples, key=KEY):
    """(examples, steps) who takes part when."""
    taken = np.zeros((examples, chosen.steps), dtype=bool)
    for step, batch in enumerate(Batches(chosen, examples, key)):
        assert len(np.unique(batch)) == len(batch)
        taken[batch, step] = True
    return taken


@pytest.mark.parametrize("chosen", ALL, ids=str)
def test_streams_are_functions_of_key_and_step(chosen):
    stream = Batches(chosen, 1000, KEY)
    whole = list(stream)
    assert len(whole) == len(stream) == 23
    for start in (0, 7, 22, 23):
        for again, first in zip(Batches(chosen, 1000, KEY).starting(start), whole[start:], strict=True):
            np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(stream.at(11), whole[11])
    assert all(batch.dtype == np.int64 for batch in whole)
    if chosen != Cyclic(23, 5):
        other = list(Batches(chosen, 1000, secrets.token_bytes(32)))
        assert any(len(a) != len(b) or np.any(a != b) for a, b in zip(whole, other, strict=True))


@pytest.mark.parametrize("chosen", ALL, ids=str)
def test_sizes_have_the_expectation_that_gradients_are_divided_by(chosen):
    stream = Batches(chosen, 20_000, KEY)
    sizes = np.array([len(batch) for batch in stream])
    assert stream.expected_size == pytest.approx(20_000 * chosen.fraction)
    assert np.all(np.abs(sizes - stream.expected_size) < 6 * np.sqrt(stream.expected_size))


@pytest.mark.parametrize("chosen", ALL, ids=str)
def test_participations_are_as_far_apart_as_the_scheme_says(chosen):
    taken = table(chosen, 2000)
    pattern = chosen.participation
    assert taken.sum(axis=1).max() <= pattern.count
    for row in taken:
        assert np.all(np.diff(np.flatnonzero(row)) >= pattern.separation)


@pytest.mark.parametrize("shuffle", [False, True])
def test_cyclic_visits_everyone_once_an_epoch_in_the_same_batches(shuffle):
    taken = table(Cyclic(15, 5, shuffle=shuffle), 1003)
    assert np.all(taken[:, :5].sum(axis=1) == 1)
    assert np.all(taken[:, :5] == taken[:, 5:10])
    sizes = taken[:, :5].sum(axis=0)
    assert sizes.max() - sizes.min() <= 1
    assert np.array_equal(np.flatnonzero(taken[:, 0]), np.arange(200)) is not shuffle


def test_balls_in_bins_keeps_its_bins_and_fills_them_at_random():
    taken = table(BallsInBins(20, 4), 40_000)
    assert np.all(taken[:, :4].sum(axis=1) == 1)
    for epoch in range(1, 5):
        assert np.all(taken[:, 4 * epoch : 4 * epoch + 4] == taken[:, :4])
    np.testing.assert_allclose(taken[:, :4].mean(axis=0), 0.25, atol=0.012)
    neighbours = np.mean(np.argmax(taken[:-1, :4], axis=1) == np.argmax(taken[1:, :4], axis=1))
    assert neighbours == pytest.approx(0.25, abs=0.012)  # independent between examples


def test_poisson_coins_are_independent():
    taken = table(Poisson(12, 0.3), 50_000)
    np.testing.assert_allclose(taken.mean(axis=0), 0.3, atol=0.012)
    correlation = np.corrcoef(taken.T) - np.eye(12)
    assert np.abs(correlation).max() < 0.03
    assert np.corrcoef(taken[:-1, 0], taken[1:, 0])[0, 1] == pytest.approx(0, abs=0.02)


def test_cyclic_poisson_keeps_groups_and_samples_within_them():
    taken = table(CyclicPoisson(24, 4, 0.5), 20_000)
    groups = {step % 4 for step in range(24)}
    for row in taken[:500]:
        assert len({int(step) % 4 for step in np.flatnonzero(row)}) <= 1
    assert groups == {0, 1, 2, 3}
    np.testing.assert_allclose(taken.mean(axis=0), 0.125, atol=0.012)


def test_b_min_sep_is_stationary_and_balls_in_bins_at_rate_one():
    taken = table(BMinSep(30, 4, 0.5), 40_000)
    np.testing.assert_allclose(taken.mean(axis=0), BMinSep(30, 4, 0.5).fraction, atol=0.01)
    full = table(BMinSep(12, 4, 1.0), 5000)
    assert np.all(full[:, :4].sum(axis=1) == 1)
    assert np.all(full[:, 4:8] == full[:, :4])


def test_empty_batches_are_legal():
    assert any(len(batch) == 0 for batch in Batches(Poisson(50, 0.01), 3, KEY))
    assert any(len(batch) == 0 for batch in Batches(BallsInBins(20, 20), 3, KEY))


@given(st.integers(1, 3000), st.floats(1e-4, 1.0), st.integers(0, 2**40))
def test_coin_flips_are_sorted_distinct_and_in_range(count, rate, counter):
    heads = coin_flips(KEY, "test", counter, count, rate)
    assert np.all(np.diff(heads) > 0)
    assert len(heads) == 0 or (heads[0] >= 0 and heads[-1] < count)
    assert rate < 1 or len(heads) == count


def test_coin_flips_have_the_binomial_law():
    sizes = np.array([len(coin_flips(KEY, "law", step, 500, 0.02)) for step in range(4000)])
    assert sizes.mean() == pytest.approx(10, abs=0.2)
    assert sizes.var() == pytest.approx(9.8, rel=0.1)
    ends = np.array([np.isin([0, 499], coin_flips(KEY, "ends", step, 500, 0.02)) for step in range(4000)])
    np.testing.assert_allclose(ends.mean(axis=0), 0.02, atol=0.009)


def test_groups_and_permutations_are_complete_across_blocks(monkeypatch):
    monkeypatch.setattr(randomness, "_BLOCK", 64)
    order, starts = grouped(KEY, "test", 1000, 7)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert starts[0] == 0
    assert starts[-1] == 1000
    for group in range(7):
        assert np.all(np.diff(order[starts[group] : starts[group + 1]].astype(int)) > 0)
    mixed = permuted(KEY, "test", 1000)
    assert np.array_equal(np.sort(mixed), np.arange(1000))
    assert not np.array_equal(mixed, np.arange(1000))


def test_logarithms_are_accurate_and_the_stream_is_pinned():
    """The stream is part of a run's identity: if these numbers change, old runs can no longer be resumed."""
    values = np.random.default_rng(0).random(10_000) + 1e-300
    np.testing.assert_allclose(randomness._log(values), np.log(values), rtol=1e-14)
    assert words(KEY, "pin", 3, 2).tolist() == [15324713588993834264, 1176196323959817945]
    assert Batches(BallsInBins(8, 4), 20, KEY).at(1).tolist() == Batches(BallsInBins(8, 4), 20, KEY).at(5).tolist()
    assert [batch.tolist() for batch in Batches(Poisson(3, 0.2), 12, KEY)] == [[2, 6], [6], [3, 7, 8]]


def test_ten_million_examples_take_seconds_and_four_bytes_each():
    stream = Batches(BallsInBins(100, 50), 10**7, KEY)
    assert len(stream.at(3)) == pytest.approx(2e5, rel=0.02)
    order, _ = stream._groups
    assert order.nbytes == 4 * 10**7
    first = next(iter(Batches(Poisson(100, 1e-6), 10**8, KEY)))
    assert len(first) < 200


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batches(BallsInBins(8, 4), 20, KEY).at(8), "step 8 is beyond the 8 steps that the guarantee covers"),
        (lambda: next(Batches(Poisson(8, 0.4), 20, KEY).starting(9)), "make a new plan"),
        (lambda: Batches(BallsInBins(8, 4), 20, b"short"), "a sampling key is 32 bytes"),
        (lambda: Batches(BallsInBins(8, 4), 0, KEY), "examples=0"),
        (lambda: BallsInBins(8, 9), "separation=9 exceeds"),
        (lambda: Poisson(8, 0.0), "rate=0"),
        (lambda: Poisson(8, 1.5), "rate=1.5"),
        (lambda: CyclicPoisson.of_fraction(100, 20, 0.1), "use at most 10 bands, or balls_in_bins"),
        (lambda: BMinSep.of_fraction(100, 20, 0.1), "at most 10 bands, or balls_in_bins"),
        (lambda: scheme("balls-in-bins", steps=8, separation=4, reshuffle=True), "drawn once and kept in every epoch"),
        (lambda: scheme("random_allocation", steps=8), "there is no sampling scheme 'random_allocation': use cyclic, "),
        (lambda: scheme("poisson", steps=8), "poisson needs rate as well"),
    ],
)
def test_what_is_not_a_scheme_is_refused_in_one_sentence(make, message):
    with pytest.raises(QuellError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_reshuffle_cannot_be_written_down():
    with pytest.raises(TypeError):
        BallsInBins(8, 4, reshuffle=True)


def test_the_key_is_never_shown():
    stream = Batches(BallsInBins(8, 4), 20, KEY)
    assert KEY.hex() not in repr(stream)
    assert str(KEY) not in repr(stream)


def test_every_scheme_can_be_built_by_name():
    options = {"steps": 12, "separation": 4, "rate": 0.2, "groups": 3}
    for name, kind in SCHEMES.items():
        takes = {field.name for field in dataclasses.fields(kind)} - {"shuffle", "participations"}
        chosen = scheme(name, **{option: options[option] for option in takes})
        assert type(chosen) is kind
        assert len(list(itertools.islice(Batches(chosen, 10, KEY), 12))) == 12
