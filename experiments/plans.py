"""The mechanisms of the training runs, each with the noise that is certified for it: `experiments/plans/*.json`.

    PYTHONPATH=src python experiments/plans.py

Done once, without a GPU, in minutes; the training scripts only read the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from common import PLANS, Entry, read_json, write_json

from quell import plan, strategy, workload
from quell.planning import Prices, version2
from quell.run import Run

DELTA = 1e-5


@dataclass(frozen=True)
class Task:
    """An optimizer, and the (steps, separation) of a run over all data ("full") and over four fifths ("held-out")."""

    examples: int
    momentum: float
    decay: float
    runs: dict[str, tuple[int, int]]
    epochs: int = 10
    ema: float | None = None  # where the averaged weights are what is tested
    adaptive: bool = False
    parameters: int | None = None  # of the model, where the planner is told


# 50,000 images; and 40,000 of them as in the BISR paper, whose last epoch is a step longer than the others.
CIFAR10 = Task(50_000, 0.9, 0.9999, {"full": (970, 97), "held-out": (781, 78)})
IMDB = Task(25_000, 0.95, 0.99999, {"full": (480, 48), "held-out": (390, 39)})
# The runs of `small_tasks.py` are as long, with smaller networks, whose noise may keep more.
SMALL = {
    "small": replace(CIFAR10, parameters=33_000),
    "small_adaptive": replace(CIFAR10, parameters=33_000, adaptive=True),
}
SMALL_EXAMPLES = {"words": 25_000, "patches": 50_000}
STUDIED, ADAPTIVE = ("sgd", "adamw"), ("adamw", "scaled", "corrected")  # recipes with all mechanisms, and with AdamW
# The runs of `published.py`. On four fifths of the data they keep the plan, with smaller batches and so more noise.
PUBLISHED = {
    "scratch": (Task(50_000, 0.9, 1.0, {"full": (800, 20)}, 40, 0.98, parameters=616_842), (1.0, 2.0, 3.0, 4.0, 8.0)),
    "pretrained": (Task(50_000, 0.9, 1.0, {"full": (200, 20)}, 10, 0.95, parameters=2_436_106), (0.5, 1.0, 2.0)),
    "reviews": (Task(25_000, 0.9, 1.0, {"full": (250, 25)}, 10, 0.95, True, 22_700_000), (1.0, 3.0, 9.0)),
}


@dataclass(frozen=True)
class Choice:
    """A mechanism, and what its shape is fitted to: the optimizer's own workload, its average, or prefix sums."""

    family: str
    parameters: dict[str, Any]
    fitted_to: str = "optimizer"


PAPER = {
    "DP-SGD": Choice("identity", {}),
    "BSR p=4": Choice("bsr", {"bands": 4}),
    "BISR p=4": Choice("bisr", {"bands": 4}),
    "BandMF p=4": Choice("band_toeplitz", {"bands": 4}),
    "BandInvMF p=4": Choice("band_inv", {"bands": 4}),
}
STUDY = {
    "DP-SGD": PAPER["DP-SGD"],
    "BSR p=4": PAPER["BSR p=4"],
    "BISR p=4": PAPER["BISR p=4"],
    "BandInvMF p=4": PAPER["BandInvMF p=4"],
    "BISR p=16": Choice("bisr", {"bands": 16}),
    "BandInvMF p=16": Choice("band_inv", {"bands": 16}),
    "BandMF p=16": Choice("band_toeplitz", {"bands": 16}),
    "λCGD 0.7": Choice("lambda_cgd", {"lambda": 0.7}),
    "λCGD 0.9": Choice("lambda_cgd", {"lambda": 0.9}),
    "λCGD 0.97": Choice("lambda_cgd", {"lambda": 0.97}),
    "BISR p=4, prefix": Choice("bisr", {"bands": 4}, "prefix"),
    "BISR p=16, prefix": Choice("bisr", {"bands": 16}, "prefix"),
    "BandInvMF p=4, prefix": Choice("band_inv", {"bands": 4}, "prefix"),
    "BandInvMF p=16, prefix": Choice("band_inv", {"bands": 16}, "prefix"),
    "fractional p=4, γ=0.7": Choice("fractional", {"bands": 4, "gamma": 0.7}),
    "BLT": Choice("blt", {}),
}
# What those who use the peers' libraries would run: the sampling that amplifies their mechanism best.
PEERS = {"poisson": {"DP-SGD": PAPER["DP-SGD"]}, "cyclic_poisson": {"BandMF p=16": STUDY["BandMF p=16"]}}
# What an objective must tell apart at every ε: the best of those above, what a planner could choose, and the peers.
WIDE = {
    "balls_in_bins": {
        **{
            label: STUDY[label]
            for label in ("BISR p=4", "BISR p=16", "BandMF p=16", "λCGD 0.7", "λCGD 0.9", "λCGD 0.97")
        },
        **{label: STUDY[label] for label in ("BandInvMF p=4, prefix", "BandInvMF p=16, prefix")},
        "BSR p=16": Choice("bsr", {"bands": 16}),
        "BandInvMF p=16, h=30": Choice("band_inv", {"bands": 16, "horizon": 30}),
        "BandInvMF p=16, h=485": Choice("band_inv", {"bands": 16, "horizon": 485}),
        "BLT h=61": Choice("blt", {"buffers": 2, "horizon": 61}),
    },
    "cyclic_poisson": {f"BandMF p={bands}": Choice("band_toeplitz", {"bands": bands}) for bands in (4, 16, 32)},
    "poisson": {"DP-SGD": PAPER["DP-SGD"]},
}
EPSILONS = (2.0, 0.5, 4.0, 1.0, 9.0)
MORE = {  # what the planner chose for the first CIFAR-10 run before today's objective
    "fractional p=16, γ=0.65": Choice("fractional", {"bands": 16, "gamma": 0.65}),
    "BandInvMF p=16, h=485": Choice("band_inv", {"bands": 16, "horizon": 485}),
}
PLANNED = "planner's choice"
TEXT = {"DP-SGD": PAPER["DP-SGD"], "BISR p=4": PAPER["BISR p=4"], "λCGD 0.9": STUDY["λCGD 0.9"]}
LAMBDAS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
SWEEP = {f"λCGD {value:g}": Choice("lambda_cgd", {"lambda": value}) for value in LAMBDAS}


def priced(choice: Choice, task: Task, size: str, epsilon: float, sampling: str) -> Entry:
    """The line of a plan file."""
    steps, separation = task.runs[size]
    optimizer = workload.sgd(steps, task.momentum, task.decay)
    run = Run.from_steps(
        steps=steps,
        separation=separation,
        epochs=task.epochs,
        epsilon=epsilon,
        delta=DELTA,
        sampling=sampling,
        momentum=task.momentum,
        weight_decay=task.decay,
    )
    prices = Prices(run)
    ema = {"ema": task.ema} if choice.fitted_to == "average" else {}
    fitted = {
        "prefix": workload.prefix(steps),
        "optimizer": optimizer,
        "average": workload.sgd(steps, task.momentum, task.decay, **ema),
    }[choice.fitted_to]
    parameters = dict(choice.parameters)
    if choice.family == "band_toeplitz":  # on fewer data an epoch may have fewer steps than all data allow bands
        parameters["bands"] = min(parameters["bands"], separation)
    built = strategy.build(choice.family, fitted, run.participation, None, **parameters)
    adaptive = {"adaptive": True} if task.adaptive else {}
    return {**version2.row(prices, prices.certify(built)), "fitted_to": choice.fitted_to, **ema, **adaptive}


def planned(task: Task, epsilon: float) -> tuple[Choice, str]:
    """What `quell plan` recommends for the run over all data when it may choose among everything, and its sampling."""
    steps, separation = task.runs["full"]
    found = plan(
        examples=task.examples,
        batch_size=task.examples // separation,
        epochs=steps // separation,
        epsilon=epsilon,
        delta=DELTA,
        momentum=task.momentum,
        weight_decay=task.decay,
        ema=task.ema,
        adaptive=task.adaptive,
        parameters=task.parameters,
    ).mechanism
    return Choice(found.name, found.strategy.parameters), found.sampling


def extend(
    file: str, task: Task, choices: dict[str, Choice], epsilons: tuple[float, ...], samplings: tuple[str, ...]
) -> None:
    """Add the lines that a plan file does not have yet."""
    path = PLANS / f"{file}.json"
    lines = read_json(path) if path.exists() else {}
    for epsilon, sampling, size, (label, choice) in product(epsilons, samplings, task.runs, choices.items()):
        name = plan_name(label, epsilon, sampling, size)
        if name not in lines:
            line = lines[name] = {"label": label, **priced(choice, task, size, epsilon, sampling)}
            print(f"{name:60s} σ={line['noise_multiplier']:.4g} RMSE {line['rmse']:.4g}", flush=True)
            write_json(path, lines)


def extend_by_planned(file: str, task: Task, epsilon: float) -> None:
    """Add the planner's choice, unless the file has it for every size of data."""
    path = PLANS / f"{file}.json"
    known = read_json(path).values() if path.exists() else ()
    if sum(line["label"] == PLANNED and line["epsilon"] == epsilon for line in known) < len(task.runs):
        choice, sampling = planned(task, epsilon)
        extend(file, task, {PLANNED: choice}, (epsilon,), (sampling,))


def extend_by_fits(task: Task) -> None:
    """BandMF for the runs from scratch with other bands, and fitted to the average: which of both matters?"""
    fits = {f"BandMF p={bands}": Choice("band_toeplitz", {"bands": bands}) for bands in (5, 8)}
    for bands in (5, 16):
        fits[f"BandMF p={bands}, average"] = Choice("band_toeplitz", {"bands": bands}, "average")
    extend("scratch", task, fits, (8.0,), ("cyclic_poisson",))


def plan_name(label: str, epsilon: float, sampling: str, size: str) -> str:
    return f"{label} | ε={epsilon:g} | {sampling} | {size}"


def small_lines(recipe: str) -> dict[str, Entry]:
    """The mechanisms of `small_tasks.py`, by their names."""
    adaptive = recipe in ADAPTIVE
    files = ("predictors", "epsilons", "small_adaptive" if adaptive else "small")
    lines = {name: line for file in files for name, line in read_json(PLANS / f"{file}.json").items()}
    return {name: line | {"adaptive": True} for name, line in lines.items()} if adaptive else lines


def main() -> None:
    both = ("balls_in_bins", "cyclic")
    extend("imdb", IMDB, TEXT, (9.0,), ("balls_in_bins",))
    extend("imdb", IMDB, PEERS["poisson"], (9.0,), ("poisson",))
    extend("cifar10", CIFAR10, PAPER, (9.0,), both)
    for sampling, choices in PEERS.items():
        extend("cifar10", CIFAR10, choices, (9.0,), (sampling,))
    extend("cifar10", CIFAR10, MORE, (9.0,), ("balls_in_bins",))
    extend_by_planned("cifar10", CIFAR10, 9.0)
    extend("predictors", CIFAR10, STUDY, (9.0, 1.0), ("balls_in_bins",))
    extend("lambda_sweep", CIFAR10, SWEEP, (8.0, 1.0), both)
    for file, (task, epsilons) in PUBLISHED.items():
        for sampling, choices in PEERS.items():
            extend(file, task, choices, epsilons, (sampling,))
        for epsilon in epsilons:
            extend_by_planned(file, task, epsilon)
    extend_by_fits(PUBLISHED["scratch"][0])
    for (file, small), epsilon in product(SMALL.items(), EPSILONS):
        extend_by_planned(file, small, epsilon)
    for epsilon, (sampling, choices) in product(EPSILONS, WIDE.items()):
        there = STUDY if sampling == "balls_in_bins" and epsilon in (9.0, 1.0) else {}  # in "predictors"
        new = {label: choice for label, choice in choices.items() if label not in there}
        extend("epsilons", CIFAR10, new, (epsilon,), (sampling,))


if __name__ == "__main__":
    main()
