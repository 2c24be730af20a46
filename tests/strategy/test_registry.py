"""Building strategies by name, and refusing what cannot be built."""

from __future__ import annotations

import numpy as np
import pytest

from quell import strategy, workload
from quell.errors import QuellError
from quell.participation import Participation

N = 30
SUMS, PATTERN = workload.prefix(N), Participation(N, 5)


def test_fractional_contains_its_neighbours():
    bisr = strategy.build("bisr", SUMS, PATTERN, bands=6)
    cgd = strategy.build("lambda_cgd", SUMS, PATTERN, **{"lambda": 0.9})
    identity = strategy.build("fractional", SUMS, PATTERN, bands=6, gamma=0.0)
    np.testing.assert_allclose(strategy.build("fractional", SUMS, PATTERN, bands=6, gamma=0.5).noising, bisr.noising)
    same = strategy.build("fractional", SUMS, PATTERN, bands=2, gamma=1.0, **{"lambda": 0.9})
    np.testing.assert_allclose(same.noising, cgd.noising)
    np.testing.assert_allclose(identity.matrix(), np.eye(N))


def test_square_root_squares_to_the_workload_and_its_heads_are_bsr_and_bisr():
    task = workload.sgd(N, 0.9, 0.99)
    root = strategy.build("square_root", task, PATTERN)
    np.testing.assert_allclose(root.matrix() @ root.matrix(), task.matrix(), atol=1e-10)
    np.testing.assert_allclose(strategy.build("bsr", task, PATTERN, bands=4).coefficients, root.coefficients[:4])
    np.testing.assert_allclose(strategy.build("bisr", task, PATTERN, bands=4).noising, root.noising[:4])


def test_square_root_of_a_given_workload():
    task = workload.toeplitz(1.0 / np.arange(1, N + 1))
    root = strategy.build("square_root", task, PATTERN)
    np.testing.assert_allclose(root.matrix() @ root.matrix(), task.matrix(), atol=1e-12)


def test_tree_decodes_prefix_sums_with_as_many_nodes_as_one_bits():
    tree = strategy.build("tree", SUMS, PATTERN)
    decoder = SUMS.matrix() @ np.linalg.inv(tree.matrix())
    assert set(np.unique(decoder.round(9))) == {0.0, 1.0}
    assert [int(row.sum().round()) for row in decoder] == [t.bit_count() for t in range(1, N + 1)]


def test_bands_beyond_the_run_are_those_of_the_run():
    assert strategy.build("bsr", SUMS, PATTERN, bands=1000).bands == N
    assert repr(strategy.build("bisr", SUMS, PATTERN, bands=1000)) == "bisr(bands=30) over 30 steps"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", list(strategy.FAMILIES))
def test_the_smallest_runs_work(name, n):
    parameters = {"bands": 2, "lambda": 0.5, "gamma": 0.5, "buffers": 1}
    family = strategy.find(name)
    built = strategy.build(
        name, workload.prefix(n), Participation.single(n), **{p: parameters[p] for p in family.required}
    )
    np.testing.assert_allclose(built.matrix() @ built.noising_matrix(), np.eye(n), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("bssr", {}, "there is no mechanism 'bssr', perhaps bsr: choose one of"),
        ("DP-SGD", {}, "there is no mechanism 'DP-SGD', DP-SGD is identity: choose one of"),
        ("bisr", {}, "bisr needs bands: for example bands=16"),
        ("bisr", {"bands": 0}, "bands=0 must be a whole number of at least 1"),
        ("bisr", {"bands": 2.5}, "bands=2.5 must be a whole number"),
        ("bisr", {"bands": 4, "gamma": 0.5}, "bisr does not take gamma: it takes bands"),
        ("lambda_cgd", {"lambda": 1.5}, "lambda=1.5 must lie between 0"),
        ("lambda_cgd", {"lambda": float("nan")}, "lambda=nan is not a finite number"),
        ("fractional", {"bands": 2, "gamma": -1}, "gamma=-1 must lie between 0"),
        ("tree", {"column_normalise": True}, "tree cannot be column-normalised"),
        ("identity", {"bands": 3}, "identity does not take bands: it takes no parameters"),
    ],
)
def test_bad_requests_get_one_clear_sentence(name, parameters, message):
    with pytest.raises(QuellError, match=message) as caught:
        strategy.build(name, SUMS, PATTERN, **parameters)
    assert "\n" not in str(caught.value)


def test_hyphens_are_accepted():
    assert strategy.find("lambda-cgd") is strategy.FAMILIES["lambda_cgd"]


@pytest.mark.parametrize(
    ("name", "size"), [("blt", {"buffers": 1}), ("band_inv", {"bands": 3}), ("band_toeplitz", {"bands": 3})]
)
def test_a_horizon_shapes_for_sums_that_fade_and_is_remembered(name, size):
    task = workload.sgd(N, 0.9, 0.99)
    shaped = strategy.build(name, task, PATTERN, **size, horizon=10)
    plain = strategy.build(name, workload.sgd(N, 0.0, 0.99 * 0.9), PATTERN, **size)
    np.testing.assert_allclose(shaped.noising_matrix(), plain.noising_matrix(), atol=1e-12)
    assert shaped.parameters["horizon"] == 10
    again = strategy.build(name, task, PATTERN, shaped.solution, **dict(shaped.parameters))
    np.testing.assert_allclose(again.noising_matrix(), shaped.noising_matrix(), atol=1e-12)
    with pytest.raises(QuellError, match="bisr does not take horizon"):
        strategy.build("bisr", task, PATTERN, bands=3, horizon=10)


@pytest.mark.parametrize("leading", [0.0, -1.0, 2.7e-162, 1e-101])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_solution_whose_squares_vanish_is_refused(leading, normalise):
    """Squares below 10⁻³⁰⁸ are lost: columns normalised by what is left of them are longer than they say."""
    forged = np.array([leading, 1.5e-162, 1.5e-162, 1.5e-162])
    with pytest.raises(QuellError, match="diagonal of C"):
        strategy.build("band_toeplitz", SUMS, PATTERN, forged, bands=4, column_normalise=normalise)
    if leading > 0:
        inverse = np.array([1.0 / leading, 0.0, 0.0, 0.0])
        with pytest.raises(QuellError, match="diagonal of C"):
            strategy.build("band_inv", SUMS, PATTERN, inverse, bands=4, column_normalise=normalise)
        with pytest.raises(QuellError, match="diagonal"):
            strategy.build("band", SUMS, PATTERN, np.tile(forged, (N, 1)), bands=4)


def test_columns_are_normalised_at_any_size_that_is_allowed():
    shape = np.array([1.0, 0.5, 0.3, 0.2])
    for size in (1e-99, 1.0, 1e99):
        columns = strategy.build("band_toeplitz", SUMS, PATTERN, size * shape, bands=4, column_normalise=True).matrix()
        np.testing.assert_allclose(np.linalg.norm(columns, axis=0), 1.0, rtol=1e-12)


@pytest.mark.parametrize("family", ["bisr", "band_inv", "fractional", "bsr", "band_toeplitz"])
def test_one_band_is_independent_noise_under_every_scheme(family):
    """A C⁻¹ of one band makes C one band too, coefficients and all: scaled columns of balls in bins tripped over it."""
    from quell.privacy.bins import bins_of
    from quell.schemes import BallsInBins

    built = strategy.build(family, SUMS, PATTERN, bands=1, column_normalise=True)
    assert (built.bands, len(built.coefficients)) == (built.noising_bands, len(built.noising)) == (1, 1)
    np.testing.assert_allclose(built.matrix(), np.eye(N))
    np.testing.assert_allclose(built.noising_matrix(), np.eye(N))
    np.testing.assert_allclose(bins_of(built, BallsInBins(N, 5)).energies, N / 5)


@pytest.mark.parametrize(
    ("name", "options"), [("bisr", {"bands": 3}), ("bsr", {"bands": 3}), ("blt", {"buffers": 1}), ("square_root", {})]
)
def test_series_have_as_many_coefficients_as_bands(name, options):
    built = strategy.build(name, SUMS, PATTERN, **options)
    assert len(built.coefficients) == built.bands
    assert len(built.noising) == built.noising_bands


@pytest.mark.parametrize("options", [{"horizon": 1}, {"divergence": 1e-300}])
def test_shapes_without_meaning_are_refused(options):
    with pytest.raises(QuellError, match=next(iter(options))):
        strategy.build("band_toeplitz", SUMS, PATTERN, bands=3, **options)


@pytest.mark.parametrize("size", [1e-90, 1.0, 1e90])
def test_the_size_of_learning_rates_does_not_change_what_is_best(size):
    rates = size * workload.schedule("cosine", N)
    for name, pattern, options in (("band", PATTERN, {"bands": 3}), ("dense", Participation.single(N), {})):
        found = strategy.build(name, workload.sgd(N, 0.9, 1.0, rates), pattern, **options)
        same = strategy.build(name, workload.sgd(N, 0.9, 1.0, rates / size), pattern, **options)
        np.testing.assert_allclose(found.row_bands, same.row_bands, atol=1e-5)
