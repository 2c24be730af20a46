"""What `quell train` does: plan, train, write the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count, require_finite
from quell.files import require_writable
from quell.planning import Plan, make_plan
from quell.planning.search import Progress
from quell.run import Run
from quell.show import plots
from quell.train import data, models
from quell.train.comparison import GRID, LAW, TRIALS, Arm, Outcome, Setting, arms_of, compare
from quell.train.content import content_of, write_page
from quell.tuning import tune


@dataclass(frozen=True)
class Files:
    """The files to write; None for those that were not asked for."""

    weights: Path | None = None
    plan: Path | None = None
    report: Path | None = None
    plot: Path | None = None
    html: Path | None = None

    @property
    def wanted(self) -> list[Path]:
        return [path for each in fields(self) if (path := getattr(self, each.name)) is not None]


def train(
    path: Path,
    files: Files,
    progress: Progress,
    finished: Callable[[Outcome], None],
    *,
    model: str = "auto",
    learning_rate: float | None = None,
    max_grad_norm: float = 1.0,
    runs: int = 1,
    baselines: bool = True,
    seed: int | None = None,
    budget: Path | None = None,
    **run: Any,
) -> dict[str, Any]:
    """Plan for the file's examples, train, write the files, and return what came out (`content.content_of`).

    `run` are the arguments of `Run.from_data` that the file does not decide.
    """
    _check(files, learning_rate, runs, seed)
    if budget is not None and baselines:
        raise QuellError("--budget counts private runs, and baselines are trained without privacy: add --no-baselines")
    require_clip_norm(max_grad_norm)
    arrays = data.load(path, validate=learning_rate is None)
    models.build(model, arrays.shape, arrays.classes)  # refuses a model that does not fit, before the long part
    search = None
    if learning_rate is None:
        search = tune(examples=len(arrays.train), trials=TRIALS, law=LAW, settings=len(GRID), progress=progress, **run)
    plan = search.plans[0] if search else make_plan(Run.from_data(examples=len(arrays.train), **run), progress)
    recipe = Setting(plan, arrays, model, max_grad_norm, seed, search, budget)
    arms = arms_of(plan, search) if baselines else [Arm("planned", plan.mechanism)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: threads that wait for each other cost more than they save
    try:
        with threadpool_limits(1):
            outcomes = compare(recipe, arms, runs, learning_rate, progress, finished)
    finally:
        torch.set_num_threads(threads)
    content = content_of(recipe, outcomes)
    _write(files, plan, outcomes, content)
    return content


def _check(files: Files, learning_rate: float | None, runs: int, seed: int | None) -> None:
    """Check the options before minutes of training."""
    require_count("runs", runs)
    if seed is not None:
        require_count("seed", seed, least=0)
    if learning_rate is not None and require_finite("lr", learning_rate) <= 0:
        raise QuellError(f"lr={learning_rate:g} must be positive: 0.1 is a start, or leave it out to search")
    if files.report is not None and files.report.suffix not in (".md", ".json"):
        raise QuellError(f"the report {files.report} must end in .md or .json")
    if files.plot is not None:
        plots.require_picture(files.plot)
    require_writable(files.wanted)


def _write(files: Files, plan: Plan, outcomes: list[Outcome], content: dict[str, Any]) -> None:
    """Write what was asked for, first what only training can make: weights and report.

    They are those of the first planned run, which the promise covers.
    """
    first = outcomes[-1].runs[0]
    assert first.report is not None
    try:
        if files.weights is not None:
            torch.save(first.model.state_dict(), files.weights)
        if files.report is not None and files.report.suffix == ".json":
            files.report.write_text(first.report.json() + "\n", encoding="utf-8")
        elif files.report is not None:
            beyond = "".join(f"- {note}\n" for note in content["notes"])
            files.report.write_text(f"{first.report.markdown()}\n{beyond}", encoding="utf-8")
    except (OSError, RuntimeError) as problem:
        raise QuellError(f"cannot write the results: {problem}") from problem
    if files.plan is not None:
        plan.save(files.plan)
    if files.html is not None:
        write_page(content, files.html)
    if files.plot is not None:
        plots.draw_training(content, files.plot)
