"""What `quell train` does: plan, train, write the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from quell.adapters.choice import require_clip_norm
from quell.errors import QuellError, require_count, require_finite
from quell.files import PLOT, require_writable
from quell.planning import make_plan
from quell.planning.search import Progress
from quell.run import Run
from quell.show import plots, words
from quell.show.outcomes import TRIAL_PLAN, training_title
from quell.train import data, models, saved
from quell.train.comparison import GRID, LAW, TRIALS, Arm, Outcome, Setting, arms_of, compare
from quell.train.content import content_of, write_page
from quell.tuning import tune


@dataclass(frozen=True)
class Folder:
    """The folder that a run writes to, a picture of its curves, if one is wanted, and whether it searches a rate."""

    path: Path
    plot: Path | None = None
    searches: bool = False

    @property
    def files(self) -> list[Path]:
        """All files, in the order in which they are written: first what only training can make."""
        plan = TRIAL_PLAN if self.searches else "plan.json"
        names = (saved.NAME, "privacy.md", "privacy.json", plan, "page.html")
        return [*(self.path / name for name in names), *([] if self.plot is None else [self.plot])]

    def make(self) -> None:
        """Make the folder, or take one that is empty: models that were trained before are not overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise QuellError(f"{self.path} is a file, and is not replaced: name a new folder, --out")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise QuellError(f"{self.path} is not empty, and holds perhaps an earlier model: name a new folder, --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise QuellError(f"cannot make the folder {self.path}: {problem.strerror or problem}") from problem
        require_writable(*((file, PLOT) for file in self.files))  # what is in the folder is new


def default_batch_size(examples: int) -> int:
    """About forty batches an epoch, of 16 to 1,024 examples.

    >>> [default_batch_size(examples) for examples in (100, 2_000, 10**6)]
    [16, 50, 1024]
    """
    return min(max(16, examples // 40), 1024, examples)


def train(
    path: Path,
    folder: Folder,
    progress: Progress,
    finished: Callable[[Outcome], None],
    *,
    known: data.Known | None = None,
    model: str = "auto",
    learning_rate: float | None = None,
    max_grad_norm: float = 1.0,
    runs: int = 1,
    baselines: bool = False,
    seed: int | None = None,
    log: Path | None = None,
    batch_size: int | None = None,
    delta: float | None = None,
    **run: Any,
) -> dict[str, Any]:
    """Plan for the file's examples, train, write the files, and return what came out (`content.content_of`).

    `run` are the other arguments of `Run.from_data` that the file does not decide.
    """
    _check(folder, learning_rate, runs, seed)
    if log is not None and learning_rate is None:
        raise QuellError("--log needs --lr: without it, the number of trials is part of what the promise keeps secret")
    require_clip_norm(max_grad_norm)
    examples = data.load(path, known or data.Known(), validate=learning_rate is None)
    models.build(model, examples.shape, len(examples.classes), examples.columns)  # refuses before the long part
    folder.make()
    count = len(examples.train)
    run |= {"batch_size": default_batch_size(count) if batch_size is None else batch_size, "delta": delta}
    search = None
    if learning_rate is None:
        search = tune(examples=count, trials=TRIALS, law=LAW, settings=len(GRID), progress=progress, **run)
    plan = search.plans[0] if search else make_plan(Run.from_data(examples=count, **run), progress)
    recipe = Setting(plan, examples, model, max_grad_norm, seed, search, log)
    arms = arms_of(plan, search) if baselines else [Arm("planned", plan.mechanism)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: threads that wait for each other cost more than they save
    try:
        with threadpool_limits(1):
            outcomes = compare(recipe, arms, runs, learning_rate, progress, finished)
    finally:
        torch.set_num_threads(threads)
    target = None if known is None else known.target
    content = content_of(training_title(path.resolve().name, target, date.today()), recipe, outcomes)
    if delta is None:
        content["notes"].append(words.usual_delta(recipe.run))
    _write(folder, recipe, outcomes[-1], content)
    return content


def _check(folder: Folder, learning_rate: float | None, runs: int, seed: int | None) -> None:
    """Check the options before minutes of training."""
    require_count("runs", runs)
    if seed is not None:
        require_count("seed", seed, least=0)
    if learning_rate is not None and require_finite("lr", learning_rate) <= 0:
        raise QuellError(f"lr={learning_rate:g} must be positive: 0.1 is a start, or leave it out to search")
    if folder.plot is not None:
        plots.require_picture(folder.plot)


def _write(folder: Folder, recipe: Setting, planned: Outcome, content: dict[str, Any]) -> None:
    """Write all files. Model and report are those of the first planned run, which the promise covers."""
    first = planned.runs[0]
    assert first.report is not None
    model, markdown, report, plan, page, *_ = folder.files
    try:
        saved.Model.of(first.model, recipe.model, recipe.data).save(model)
        notes = "".join(f"- {note}\n" for note in content["notes"])
        markdown.write_text(f"{first.report.markdown()}\n{notes}", encoding="utf-8")
        report.write_text(first.report.json() + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as problem:
        raise QuellError(f"cannot write the results: {problem}") from problem
    recipe.plan.save(plan)
    write_page(content, page)
    if folder.plot is not None:
        plots.draw_training(content, folder.plot)
