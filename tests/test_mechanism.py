"""Published numbers: Table 4 of arXiv:2601.22334 and Table 1 of arXiv:2505.12128."""

from __future__ import annotations

import numpy as np
import pytest

from quell import workload
from quell.errors import QuellError
from quell.planning import Prices
from quell.run import Run
from quell.show import words

# Column "ε=8 (w/o Amp)" of Table 4, the explicit families, as printed.
TABLE_4 = [
    ("identity", {}, 83.85),
    ("lambda_cgd", {"lambda": 0.95}, 14.74),
    ("lambda_cgd", {"lambda": 0.9}, 19.72),
    ("bisr", {"bands": 2}, 48.45),
    ("bisr", {"bands": 4}, 33.47),
    ("bisr", {"bands": 16}, 17.95),
    ("bsr", {"bands": 2}, 62.51),
    ("bsr", {"bands": 16}, 26.27),
    ("bsr", {"bands": 64}, 14.89),
    ("bsr", {"bands": 390}, 8.15),
]


@pytest.mark.parametrize(("name", "parameters", "printed"), TABLE_4)
def test_table_4_without_amplification(table4, name, parameters, printed):
    priced = table4.price(name, **parameters)
    assert priced.rmse == pytest.approx(printed, rel=1e-3)
    assert priced.guarantee.sensitivity.exact


@pytest.mark.parametrize(("name", "printed"), [("identity", 1.8), ("bsr", 3.3)])
def test_noise_multipliers_of_the_bisr_paper(name, printed):
    """40,000 images in batches of 512 for 10 epochs: 781 steps, separation 78, hence 11 participations."""
    run = Run.from_steps(steps=781, epochs=10, epsilon=9.0, delta=1e-5, momentum=0.9, weight_decay=0.9999)
    prices = Prices(run)
    assert run.participation.separation == 78
    assert run.participation.count == 11
    priced = prices.price(name, **({"bands": 4} if name == "bsr" else {}))
    assert round(priced.noise_multiplier, 1) == printed


def test_a_row_has_the_documented_keys(table4):
    content = table4.as_dict([table4.price("fractional", bands=4, gamma=0.7)])
    (row,) = content["mechanisms"]
    assert list(content) == ["run", "yardsticks", "mechanisms"]
    assert list(row) == ["family", "parameters", "noise", "error", "guarantee"]
    assert list(row["parameters"]) == ["bands", "gamma", "lambda", "column_normalise"]
    assert row["error"]["rmse"] < row["error"]["maxse"] < content["yardsticks"]["dpsgd_rmse"]
    assert content["yardsticks"]["lower_bound"] < row["error"]["rmse"]


def test_epsilon_does_not_depend_on_the_learning_rate():
    """Scaling or scheduling the learning rate changes errors, never the noise of a given strategy."""
    rates = workload.schedule("cosine", 100)
    noise = {
        Prices(Run.from_steps(steps=100, epochs=10, epsilon=8.0, delta=1e-5, momentum=0.9, learning_rates=scale))
        .price("bisr", bands=4)
        .noise_multiplier
        for scale in (None, rates, 0.001 * rates, 1000 * rates)
    }
    assert len(noise) == 1


@pytest.mark.parametrize(("name", "parameters"), [("lambda_cgd", {"lambda": 0.9}), ("band_toeplitz", {"bands": 4})])
def test_adam_wants_a_rate_that_grows_with_the_noise_of_single_steps(name, parameters):
    """It divides by the size of gradients, which is mostly that of their noise: σ times the rows of C⁻¹."""
    ratios, sizes = [], []
    for adaptive in (False, True):
        prices = Prices(Run.from_steps(steps=200, epochs=10, epsilon=2.0, delta=1e-5, momentum=0.9, adaptive=adaptive))
        mine, dpsgd = prices.price(name, **parameters), prices.price("identity")
        ratios.append(mine.learning_rate(dpsgd))
        noise = [each.noise_multiplier * np.linalg.inv(each.strategy.matrix()) for each in (mine, dpsgd)]
        sizes = [np.sqrt(np.mean(np.sum(np.square(rows), axis=1))) for rows in noise]
    assert sizes[0] > 2 * sizes[1]
    assert ratios[1] == pytest.approx(ratios[0] * sizes[0] / sizes[1], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "buffers", "draws"),
    [
        ("identity", 0, 1),
        ("lambda_cgd", 0, 2),
        ("bisr", 0, 16),
        ("bsr", 15, 1),
        ("square_root", 3899, 1),
        ("tree", 12, 1),
    ],
)
def test_memory_of_each_recurrence(table4, name, buffers, draws):
    parameters = {"lambda_cgd": {"lambda": 0.9}, "bisr": {"bands": 16}, "bsr": {"bands": 16}}.get(name, {})
    priced = table4.price(name, **parameters)
    assert (priced.buffers, priced.draws) == (buffers, draws)


def test_a_separation_that_contradicts_the_epochs_is_refused():
    with pytest.raises(QuellError, match="lets one example take part 1 times, but 100 epochs"):
        Run.from_steps(steps=1000, separation=1000, epochs=100, epsilon=8.0, delta=1e-5)


def test_an_unknown_argument_of_a_run_from_steps_is_named():
    with pytest.raises(QuellError, match="a run from steps does not know foo"):
        Run.from_steps(steps=100, epochs=10, epsilon=8.0, delta=1e-5, foo=1)


@pytest.mark.parametrize(
    ("examples", "said"), [(101, "the one left over makes some"), (103, "the 3 left over make some")]
)
def test_left_over_examples_are_counted_in_english(examples, said):
    (note,) = words.notes(Run.from_data(examples=examples, batch_size=10, epochs=1, epsilon=8.0, delta=1e-5))
    assert said in note


def test_a_caption_explains_the_letters_of_its_table_and_no_others(table4):
    from quell.show.tables import mechanism_table

    one = table4.price("band_inv", bands=2, divergence=3.0)
    other = table4.price("blt", buffers=1, horizon=50)
    assert all(letter in mechanism_table([one, other], 1.0).caption for letter in ("p: ", "d: ", "h: ", "R: "))
    assert not any(letter in mechanism_table([one], 1.0).caption for letter in ("d: ", "h: ", "*: ", "train: "))


def test_printed_noise_is_never_below_the_noise_that_is_needed(table4):
    from quell.show.tables import mechanism_table

    for name, options in (("identity", {}), ("bisr", {"bands": 3}), ("lambda_cgd", {"lambda": 0.77})):
        priced = table4.price(name, **options)
        table = mechanism_table([priced], 1.0)
        assert float(next(iter(table.columns[2].cells))) >= priced.noise_multiplier
