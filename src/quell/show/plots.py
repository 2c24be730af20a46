"""Pictures as PNG, SVG or PDF, drawn by matplotlib from the same data as the pages."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quell._types import Array
from quell.errors import QuellError
from quell.files import PLOT
from quell.show import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from quell.planning import Mechanism
    from quell.run import Run

_GREEN, _RED, _PURPLE, _GREY = "#1f6f43", "#b3341c", "#6b4fa0", "#5a626c"
_FORMATS = (".png", ".svg", ".pdf")
_APART = 0.12  # of the logarithms of two errors whose labels do not cover each other
_FEWEST_TICKS = 3
_MARGIN = 0.01  # beside the data, in widths of the axes: half a marker
_ARMS = {"not private": _GREY, "DP-SGD": _RED, "planned": _GREEN}


class Picture:
    """A drawn chart, which a notebook shows."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure  # matplotlib's

    def _repr_png_(self) -> bytes:
        text = io.BytesIO()
        self.figure.savefig(text, format="png", dpi=100)
        return text.getvalue()


def require_picture(path: str | Path | None) -> None:
    """Refuse a picture that cannot be drawn, before anything long is computed; None for one that is not written."""
    if path is not None and Path(path).suffix.lower() not in _FORMATS:
        raise QuellError(f"cannot write the plot {path}: use a name ending in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise QuellError("plots need matplotlib: pip install 'quell[plot]'")


def draw_plan(content: dict[str, Any], path: str | Path | None = None) -> Picture:
    """The four charts of a plan's page for the recommended mechanism and DP-SGD; `content` as in `show.page`."""
    require_picture(path)
    figure = _figure(12, 8.5)
    memory, error, cancellation, epsilon = figure.subplots(2, 2).flat
    chosen, dpsgd = content["mechanisms"][content["recommended"]], content["baseline"]
    baseline = "DP-SGD (estimated)" if content["baseline_estimated"] else "DP-SGD"
    _draw_memory(memory, content)
    for row, name, colour, style in ((chosen, chosen["label"], _GREEN, "-"), (dpsgd, baseline, _RED, ":")):
        error.plot(row["error"]["x"], row["error"]["y"], color=colour, linestyle=style, label=name)
        for curve in row["cancellation"][: None if row is chosen else 1]:
            start = f", noise of step {curve['start']:,}" if len(row["cancellation"]) > 1 else ""
            cancellation.plot(curve["x"], curve["y"], color=colour, linestyle=style, label=name + start)
    error.set(title="Error after each step", xlabel="step", ylabel="standard deviation", yscale="log")
    cancellation.set(
        title="Weight of one step's noise in the model",
        xlabel="steps it has been in the model",
        ylabel="weight (1: as drawn)",
        xscale="log",
    )
    _draw_epsilon(epsilon, chosen)
    for axes in (memory, error, cancellation, epsilon):
        axes.legend(fontsize="small")
        _finish(axes)
    figure.suptitle(content["setup"])
    return _save(figure, path)


def _draw_memory(axes: Axes, content: dict[str, Any]) -> None:
    rows = content["mechanisms"]
    chosen = rows[content["recommended"]]
    axes.axhline(content["lower_bound"], color=_PURPLE, linestyle="-.", label="best possible without amplification")
    best = [rows[index] for index in content["frontier"]]
    axes.step([row["buffers"] for row in best], [row["rmse"] for row in best], "--", where="post", color=_GREY)
    others = [row for row in rows if row is not chosen]
    axes.plot([row["buffers"] for row in others], [row["rmse"] for row in others], "o", color=_GREY)
    axes.plot(chosen["buffers"], chosen["rmse"], "o", color=_GREEN, markersize=9, zorder=5, label="recommended")
    most = max(1, *(row["buffers"] for row in rows))
    axes.set(title="Error by memory", xlabel="model-sized buffers", ylabel="RMSE", yscale="log")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.3, 1.3 * most)
    axes.margins(y=0.08)
    axes.set_xticks([0, *(2**power for power in range(int(most).bit_length()))])
    named: list[dict[str, Any]] = []
    for row in [chosen, *best, content["baseline"]]:  # a label that would cover another one is left out
        if all(
            row["buffers"] != each["buffers"] or abs(math.log(row["rmse"] / each["rmse"])) > _APART for each in named
        ):
            named.append(row)
            place, side = ((-8, 0), "right") if row["buffers"] > math.sqrt(most) else ((8, 0), "left")
            how: Any = {"ha": side, "va": "center", "zorder": 6, "fontsize": "small"}
            how |= {"color": _GREEN, "weight": "bold"} if row is chosen else {"color": _GREY}
            at = (row["buffers"], row["rmse"])
            axes.annotate(row["label"], at, place, textcoords="offset points", **how)


def _draw_epsilon(axes: Axes, row: dict[str, Any]) -> None:
    curve, planned = row["epsilon"], row["planned"]
    title, style, name = (
        ("ε as a function of the noise σ", "-", "guarantee")
        if curve["guaranteed"]
        else ("ε for other noise (estimated, not certified)", "--", "estimated, not certified")
    )
    axes.plot(curve["x"], curve["y"], linestyle=style, color=_GREEN if curve["guaranteed"] else _GREY, label=name)
    axes.plot(planned["sigma"], planned["epsilon"], "o", color=_GREEN, label="as planned (guarantee)")
    axes.set(title=title, xlabel="noise multiplier σ", ylabel="ε", xscale="log", yscale="log")


def draw_sweep(
    run: Run, swept: str, mechanisms: Sequence[Mechanism], dpsgd: float, bound: float, path: str | Path
) -> None:
    """RMSE and MaxSE of one family against the swept parameter, beside DP-SGD's RMSE and the lower bound."""
    require_picture(path)
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    values = [float(m.strategy.parameters[swept]) for m in mechanisms]
    axes.plot(values, [m.rmse for m in mechanisms], marker="o", label="RMSE")
    axes.plot(values, [m.maxse for m in mechanisms], marker="s", label="MaxSE")
    axes.axhline(dpsgd, color=_RED, label="DP-SGD, RMSE")
    axes.axhline(bound, color=_PURPLE, linestyle="--", label="best possible RMSE without amplification")
    if swept == "bands":
        axes.set_xscale("log", base=2)
        axes.set_xticks(values)
    target = words.level(run.epsilon, run.delta)
    axes.set(
        xlabel=swept,
        ylabel="error per unit of clip norm",
        yscale="log",
        title=f"{mechanisms[0].name} at {target}, {run.steps:,} steps",
    )
    axes.legend()
    _finish(axes)
    _save(figure, path)


def draw_training(content: dict[str, Any], path: str | Path) -> None:
    """Noise and accuracy side by side, every run thin and their mean thick; `content` as in `quell.train`."""
    require_picture(path)
    figure = _figure(11, 4.5)
    noise, accuracy = figure.subplots(1, 2)
    for arm in content["arms"]:
        name, colour = arm["name"], _ARMS[arm["name"]]
        epochs = range(1, len(arm["curve"]) + 1)
        for run in arm["accuracies"]:
            accuracy.plot(epochs, [100 * value for value in run], color=colour, alpha=0.3, linewidth=1)
        means = [100 * value for value in arm["curve"]]
        accuracy.plot(epochs, means, color=colour, marker="o", markersize=3, label=name)
        if arm["noise"] is not None:
            noise.plot(arm["noise"]["x"], arm["noise"]["y"], color=colour, label=f"{name}: {arm['mechanism']}")
    title = "Noise in the model after each step"
    noise.set(title=title, xlabel="step", ylabel="standard deviation / (lr · clip norm)", yscale="log")
    accuracy.set(title="Test accuracy", xlabel="epoch", ylabel="%")
    accuracy.xaxis.get_major_locator().set_params(integer=True)
    for axes in (noise, accuracy):
        axes.legend(fontsize="small")
        _finish(axes)
    figure.suptitle(content["setup"], fontsize="medium", wrap=True)
    _save(figure, path)


def draw_audit(present: Array, absent: Array, title: str, path: str | Path | None = None) -> Picture:
    """The scores that an attacker gives canaries that were added, and canaries that were not."""
    require_picture(path)
    figure = _figure(7.0, 4.2)
    axes = figure.subplots()
    edges = np.histogram_bin_edges(np.concatenate([present, absent]), bins=80).tolist()
    axes.hist(present, edges, alpha=0.6, color=_RED, label="added")
    axes.hist(absent, edges, alpha=0.6, color=_GREY, label="not added")
    axes.set(xlabel="evidence that a canary was added (log-likelihood ratio)", ylabel="canaries", yscale="log")
    axes.set_title(title, fontsize="small")
    axes.legend()
    return _save(figure, path)


def _finish(axes: Axes) -> None:
    """Plain numbers at the ticks, and axes that end where the data end, unless limits were set."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes.margins(x=_MARGIN)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
            axis.set_major_locator(FixedLocator(log_ticks(*sorted(axis.get_view_interval()))))
        if axis.get_scale() != "linear":
            axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
            axis.set_minor_locator(FixedLocator([]))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range on a logarithmic scale: as few as tell the scale, three where there are three.

    >>> log_ticks(2.2, 180), log_ticks(0.3, 40_000)
    ([3.0, 10.0, 30.0, 100.0], [1.0, 10.0, 100.0, 1000.0, 10000.0])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(step / 10 for step in range(10, 100))):
        found = [float(f"{step}e{decade}") for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) >= _FEWEST_TICKS:
            break
    return found


def tick(value: float) -> str:
    """A number at a tick, in full unless it is very small or large.

    >>> tick(6.0), tick(20000.0), tick(1e-5), tick(0.002)
    ('6', '20,000', '10⁻⁵', '0.002')
    """
    return f"{value:,.10g}" if not value or 1e-3 <= abs(value) < 1e7 else words.number(value)


def _figure(width: float, height: float) -> Figure:
    """An empty matplotlib figure, without a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str | Path | None) -> Picture:
    """The figure, written in the format that the path's extension names if there is one."""
    try:
        if path is not None:
            figure.savefig(path, dpi=150, metadata={"Creator": PLOT.mark})
    except (OSError, ValueError) as problem:
        raise QuellError(f"cannot write the plot {path}: {problem}") from problem
    return Picture(figure)
