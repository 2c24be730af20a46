"""Pictures: what is drawn on top, what ticks say, where axes end, and lines that do not run back."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.figure
import pytest

from quell.planning import Prices
from quell.planning.curves import page_content
from quell.run import Run
from quell.show import plots
from quell.strategy import FAMILIES

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))

import plotting


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, instead of files."""
    figures: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(plots, "_save", lambda figure, _: figures.append(figure))
    return figures


@pytest.fixture(scope="module")
def content():
    """A page's content with momentum, where weights exceed one, and a mechanism that is not the one of least RMSE."""
    from quell.planning import Plan
    from quell.planning.questions import answers

    run = Run.from_data(examples=400, batch_size=20, epochs=4, epsilon=4, sampling="cyclic", momentum=0.9)
    prices = Prices(run)
    named = {"identity": {}, "lambda_cgd": {"lambda": 0.5}, "bisr": {"bands": 8}, "bsr": {"bands": 4}, "tree": {}}
    assert set(named) <= set(FAMILIES)
    rows = tuple(prices.price(name, **parameters) for name, parameters in named.items())
    plan = Plan(run, rows, 1)
    return page_content(plan, answers(plan, thorough=False), thorough=False)


def ticks(axes) -> list[str]:
    axes.figure.canvas.draw()
    inside = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        inside += [
            text for at, text in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True) if low <= at <= high
        ]
    return [text.get_text() for text in inside]


def test_the_recommended_one_is_on_top_and_named(drawn, content):
    plots.draw_plan(content, "x.png")
    memory = drawn[0].axes[0]
    chosen = content["mechanisms"][content["recommended"]]
    (point,) = [line for line in memory.lines if line.get_label() == "recommended"]
    assert (list(point.get_xdata()), list(point.get_ydata())) == ([chosen["buffers"]], [chosen["rmse"]])
    assert point.get_zorder() > max(line.get_zorder() for line in memory.lines if line is not point)
    (name,) = [text for text in memory.texts if text.get_text() == chosen["label"]]
    assert name.xy == (chosen["buffers"], chosen["rmse"])
    assert name.get_weight() == "bold"
    best = content["mechanisms"][content["frontier"][0]]
    assert best is not chosen
    assert best["buffers"] == chosen["buffers"]


def test_ticks_are_plain_and_axes_end_with_the_data(drawn, content):
    plots.draw_plan(content, "x.png")
    prices = Prices(Run.from_steps(steps=40, epochs=4, epsilon=4, delta=1e-5))
    swept = [prices.price("bisr", bands=bands) for bands in (2, 4, 8)]
    plots.draw_sweep(prices.run, "bands", swept, prices.dpsgd.rmse, prices.lower_bound, "x.png")
    for figure in drawn:
        for axes in figure.axes:
            shown = ticks(axes)
            assert not [text for text in shown if "mathdefault" in text or "^" in text or "e+" in text]
            assert len(shown) >= 5
            assert axes.get_ylabel()
            assert axes.get_xlabel()
    memory, error, weight, epsilon = drawn[0].axes
    assert memory.get_xlim()[1] <= 1.5 * max(row["buffers"] for row in content["mechanisms"])
    for axes in (error, weight, epsilon, drawn[1].axes[0]):
        ends = [value for line in axes.lines if len(line.get_xdata()) > 2 for value in line.get_xdata()]
        first, last = (
            (axes.transData + axes.transAxes.inverted()).transform((end, 1.0))[0] for end in (min(ends), max(ends))
        )
        assert 0 <= first < 0.03
        assert 0.97 < last <= 1
    assert ticks(drawn[1].axes[0])[:3] == ["2", "4", "8"]


def test_weights_above_one_are_not_called_shares(drawn, content):
    plots.draw_plan(content, "x.png")
    weight = drawn[0].axes[2]
    assert max(max(line.get_ydata()) for line in weight.lines) > 5  # momentum adds a gradient up to ten times
    assert "%" not in "".join(ticks(weight))
    assert "weight" in weight.get_ylabel()


def test_lines_of_results_run_from_left_to_right(monkeypatch, tmp_path):
    monkeypatch.setattr(plotting, "IMAGES", tmp_path)
    seen = []
    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", lambda self, xs, ys, **_: seen.append((list(xs), list(ys))))
    unsorted = [{"panel": "a", "curve": "b", "x": x, "y": 10 * x} for x in (0.98, 0.0, 0.5)]
    plotting.lines("x", unsorted, "λ", "%", log="")
    assert seen == [([0.0, 0.5, 0.98], [0.0, 5.0, 9.8])]
