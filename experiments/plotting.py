"""Plots of result points, beside the numbers: `docs/images/results/*.png`."""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
from common import HERE, Entry

mpl.use("Agg")
from matplotlib import pyplot as plt

IMAGES = HERE.parent / "docs" / "images" / "results"


def lines(name: str, points: Iterable[Entry], x_label: str, y_label: str, log: str = "xy") -> None:
    """One panel per "panel", one line per "curve", through the points' "x" and "y"; "spread" draws error bars."""
    shown = [point for point in points if point["y"] is not None]
    panels = list(dict.fromkeys(point["panel"] for point in shown))
    curves = list(dict.fromkeys(point["curve"] for point in shown))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        for number, curve in enumerate(curves):
            mine = [point for point in shown if (point["panel"], point["curve"]) == (panel, curve)]
            mine.sort(key=lambda point: point["x"])  # results come in the order in which they were trained
            if mine:
                bars = [point.get("spread", 0.0) for point in mine]
                xs, ys = [point["x"] for point in mine], [point["y"] for point in mine]
                axis.errorbar(xs, ys, yerr=bars, marker="o", markersize=3, label=curve, color=f"C{number}", capsize=2)
        axis.set(title=panel, xlabel=x_label, ylabel=y_label)
        if "x" in log:
            axis.set_xscale("log", base=2)
        if "y" in log:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    handles = {name: each for axis in axes.flat for each, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), fontsize="small", loc="outside lower center", ncols=4)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / f"{name}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)
