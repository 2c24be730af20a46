"""Strategies whose fresh noise float32 would round away are refused, whichever way they come in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quell
from quell import QuellError, cache, strategy, workload
from quell.algebra.descent import Convergence
from quell.noise import Key, NoiseSpec, NoiseStream
from quell.participation import Participation
from quell.planning import Plan, Prices
from quell.run import Run
from quell.strategy import precision
from quell.strategy.recurrence import Exponentials, Fenwick, Recurrence, Regenerate, Ring
from quell.strategy.structure import BandedStrategy, ToeplitzStrategy

STEPS = 40
DOUBLING = np.array([1.0, 2.0])  # C⁻¹ grows like 2^t
SUMS, PATTERN = workload.prefix(STEPS), Participation(STEPS, 10)
REFUSED = "which float32 would round away"


@contextmanager
def unchecked() -> Iterator[None]:
    """The same code without the limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "MOST_GROWTH", np.inf)
        yield


def doubling_rows() -> np.ndarray:
    rows = np.tile(DOUBLING, (STEPS, 1))
    rows[0, 1] = 0.0
    return rows


@pytest.mark.parametrize(
    "make",
    [
        lambda: ToeplitzStrategy("given", STEPS, DOUBLING),
        lambda: ToeplitzStrategy("given", STEPS, given_noising=np.array([1.0, 5000.0])),
        lambda: BandedStrategy("given", doubling_rows()),
        lambda: strategy.build("band_toeplitz", SUMS, PATTERN, DOUBLING, bands=2),
        lambda: strategy.build("band_toeplitz", SUMS, PATTERN, DOUBLING, bands=2, column_normalise=True),
        lambda: strategy.build("band", SUMS, PATTERN, doubling_rows(), bands=2),
        lambda: NoiseSpec(Ring(DOUBLING), STEPS, 1.0),
        lambda: NoiseSpec(Ring(DOUBLING, np.ones(STEPS)), STEPS, 1.0),
        lambda: NoiseSpec(Ring(doubling_rows()), STEPS, 1.0),
        lambda: NoiseSpec(Regenerate(np.array([1.0, 5000.0])), STEPS, 1.0),
        lambda: NoiseSpec(Exponentials(np.array([1.0]), np.array([2.0])), STEPS, 1.0),
        lambda: NoiseSpec(Exponentials(np.array([1e6]), np.array([0.5])), STEPS, 1.0),
        # 1000·y_{t−1} − 1000·y_{t−2} nearly cancels, but the sum on the way has rounded the draw already.
        lambda: NoiseSpec(Ring(np.array([1.0, 4e4, -4e4])), 3, 1.0),
    ],
)
def test_noise_that_would_be_rounded_away_is_refused(make) -> None:
    with pytest.raises(QuellError, match=REFUSED):
        make()


@pytest.fixture(scope="module")
def attack(tmp_path_factory) -> str:
    """The plan file of the attack: true in exact arithmetic, and without noise from step 28 on in float32."""
    path = tmp_path_factory.mktemp("attack") / "plan.json"
    run = Run.from_data(examples=400, batch_size=40, epochs=4, epsilon=1.0, delta=1e-5, sampling="cyclic")
    with unchecked():
        prices = Prices(run)
        built = strategy.build("band_toeplitz", SUMS, PATTERN, DOUBLING, bands=2, column_normalise=False)
        Plan(run, (prices.certify(built),), 0).save(path)
    return str(path)


def test_the_plan_file_of_the_attack_is_refused(attack: str) -> None:
    with unchecked():
        assert Plan.load(attack).mechanism.name == "band_toeplitz"
    false = [check for check in quell.verify(attack) if not check.holds]
    assert any(REFUSED in str(check.recomputed) for check in false)
    with pytest.raises(QuellError):
        Plan.load(attack)


def test_a_mechanism_that_skipped_the_check_gets_no_noise(attack: str) -> None:
    with unchecked():
        mechanism = Plan.load(attack).mechanism
    with pytest.raises(QuellError, match=REFUSED):
        NoiseStream(mechanism, [10], key=Key.generate(), max_grad_norm=1.0)


CACHED = [
    ("band_toeplitz", {"bands": 2}, DOUBLING),
    ("band_inv", {"bands": 2}, np.array([1.0, -5000.0])),
    ("band", {"bands": 2}, doubling_rows()),
    ("blt", {"buffers": 1}, np.array([[0.5], [-0.4]])),  # C⁻¹ grows like 1.4^t
]


@pytest.mark.parametrize(("name", "options", "planted"), CACHED)
def test_planted_cache_entries_are_searched_anew(name, options, planted, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QUELL_CACHE", str(tmp_path))
    honest = strategy.build(name, SUMS, PATTERN, **options)
    facts = asdict(Convergence(1, 1, 1.0, 0.0, 0.0, True, "planted"))
    for path in tmp_path.iterdir():
        with np.load(path) as stored:
            question, shape = str(stored["question"]), stored["array"].shape
        if shape == planted.shape:
            cache._store(path, question, planted, facts)
    with unchecked():
        assert np.array_equal(strategy.build(name, SUMS, PATTERN, **options).solution, planted)
    again = strategy.build(name, SUMS, PATTERN, **options)
    np.testing.assert_array_equal(again.solution, honest.solution)


def recurrences() -> list[tuple[Recurrence, np.ndarray]]:
    """Recurrences and their matrices C⁻¹."""
    found: list[tuple[Recurrence, np.ndarray]] = []
    for name, options in (
        ("identity", {}),
        ("lambda_cgd", {"lambda": 1.0}),
        ("bisr", {"bands": 5}),
        ("bsr", {"bands": 6}),
        ("bsr", {"bands": 6, "column_normalise": True}),
        ("square_root", {}),
        ("band", {"bands": 4}),
        ("blt", {"buffers": 2}),
        ("tree", {}),
    ):
        built = strategy.build(name, SUMS, PATTERN, **options)
        scale = 1.0 if built.recurrence.row_scale is None else built.recurrence.row_scale[:, None]
        found.append((built.recurrence, built.noising_matrix() / scale))
    return found


def test_growth_is_at_least_that_of_the_rows() -> None:
    for recurrence, inverse in recurrences():
        rows = np.linalg.norm(inverse, axis=1) / np.abs(np.diag(inverse))
        growth = precision.measure(recurrence, STEPS).growth
        assert rows.max() * (1 - 1e-6) <= growth < 20, recurrence


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=5), st.integers(1, 30))
def test_growth_of_a_ring_bounds_every_partial_sum(tail: list[float], steps: int) -> None:
    """Against the dumb computation: each partial sum of each row as a combination of the draws."""
    bands = np.array([1.0, *np.asarray(tail, np.float32).astype(np.float64)])
    rows, largest = np.zeros((steps, steps)), 0.0
    for t in range(steps):
        partial = np.eye(steps)[t]
        for d in range(1, min(len(bands), t + 1)):
            partial = partial - bands[d] * rows[t - d]
            largest = max(largest, float(np.linalg.norm(partial)))
        rows[t] = partial
        largest = max(largest, float(np.linalg.norm(partial)))
    by_bands = np.tile(bands, (steps, 1))
    by_bands[np.arange(steps)[:, None] < np.arange(len(bands))] = 0.0
    for ring in (Ring(bands), Ring(by_bands[:, :steps])):
        assert precision.measure(ring, steps).growth >= largest * (1 - 1e-9)


def test_the_kept_numbers_of_a_blt_and_a_tree_are_bounded_too() -> None:
    assert precision.measure(Exponentials(np.array([1e-3]), np.array([1.0])), 10_000).growth == 100.0
    assert precision.measure(Fenwick(1000), 1000).growth == pytest.approx(2 * np.sqrt(10))
    assert precision.measure(Exponentials(np.zeros(0), np.zeros(0)), 5).growth == 1.0


@pytest.mark.parametrize("name", ["lambda_cgd", "bsr", "band_toeplitz"])
def test_a_million_steps_are_measured_in_a_fraction_of_a_second(name: str) -> None:
    """Honest strategies are far from the limit of 4,096, however long the run."""
    n = 1_000_000
    options = {"lambda_cgd": {"lambda": 1.0}}.get(name, {"bands": 16})
    built = strategy.build(name, workload.sgd(n, 0.9), Participation(n, n // 10), **options)
    precision._ring_growth.cache_clear()
    start = time.process_time()
    growth = precision.measure(built.recurrence, n).growth
    assert time.process_time() - start < 2  # measured: below 0.1 s
    assert growth < 1000


def test_sums_that_cancel_on_the_way_are_not_refused() -> None:
    """Almost what bsr is with a momentum near 1: the bound by the triangle inequality would be 5,300."""
    assert precision.measure(Ring(np.ones(16)), 1_000_000).growth == pytest.approx(np.sqrt(2e6 / 16), rel=0.01)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=5), st.integers(2, 30))
def test_the_sums_themselves_are_at_most_the_quick_bound(tail: list[float], steps: int) -> None:
    taps = np.asarray(tail, np.float32).astype(np.float64).tobytes()
    quick = precision._ring_growth.__wrapped__(taps, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "MOST_GROWTH", 0.0)
        assert precision._ring_growth.__wrapped__(taps, steps) <= quick * (1 + 1e-9)


def test_prices_and_comparisons_refuse_it_too() -> None:
    prices = Prices(Run.from_steps(steps=STEPS, separation=10, epochs=4, epsilon=1.0, delta=1e-5))
    with pytest.raises(QuellError, match=REFUSED):
        prices.certify(ToeplitzStrategy("given", STEPS, DOUBLING))
