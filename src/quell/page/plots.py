"""The page's pictures as one PNG, SVG or PDF, drawn by matplotlib from the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quell.page.content import content_of
from quell.planning import Plan
from quell.report import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREEN, _RED, _PURPLE, _GREY = "#1f6f43", "#b3341c", "#6b4fa0", "#5a626c"


def draw(plan: Plan, path: str | Path) -> None:
    """Error against memory, error per step, noise cancellation and ε(σ) of the recommended mechanism and DP-SGD."""
    content = content_of(plan)
    figure = new_figure(12, 8.5)
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
        title="How much of one step's noise remains",
        xlabel="steps it has been in the model",
        ylabel="share that remains",
        xscale="log",
    )
    _draw_epsilon(epsilon, chosen)
    for axes in (memory, error, cancellation, epsilon):
        axes.legend(fontsize="small")
    figure.suptitle(content["setup"])
    save_figure(figure, path)


def _draw_memory(axes: Axes, content: dict[str, Any]) -> None:
    rows = content["mechanisms"]
    for index, row in enumerate(rows):
        axes.plot(row["buffers"], row["rmse"], "o", color=_GREEN if index == content["recommended"] else _GREY)
    best = [rows[index] for index in content["frontier"]]
    axes.step([row["buffers"] for row in best], [row["rmse"] for row in best], "--", where="post", color=_GREY)
    for row in [*best, content["baseline"]]:
        axes.annotate(row["label"], (row["buffers"], row["rmse"]), (4, 5), textcoords="offset points", fontsize="small")
    axes.axhline(content["lower_bound"], color=_PURPLE, linestyle="-.", label="lower bound without amplification")
    axes.set(title="Error against memory", xlabel="model-sized buffers", ylabel="RMSE", yscale="log")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.3, 10 * max(1, *(row["buffers"] for row in rows)))


def _draw_epsilon(axes: Axes, row: dict[str, Any]) -> None:
    curve, planned = row["epsilon"], row["planned"]
    title, style, name = (
        ("ε as a function of the noise σ", "-", "guarantee")
        if curve["guaranteed"]
        else ("ε for other noise (estimated, not a guarantee)", "--", "estimate, not a guarantee")
    )
    axes.plot(curve["x"], curve["y"], linestyle=style, color=_GREEN if curve["guaranteed"] else _GREY, label=name)
    axes.plot(planned["sigma"], planned["epsilon"], "o", color=_GREEN, label="as planned (guarantee)")
    axes.set(title=title, xlabel="noise multiplier σ", ylabel="ε", xscale="log", yscale="log")
