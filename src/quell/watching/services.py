"""Where rows go beside the file: TensorBoard and Weights & Biases, each imported only when a log asks for it.

W&B counts rows by its own steps; ours is a metric of its own there, so that a loop may log beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from quell.errors import QuellError

if TYPE_CHECKING:
    from quell.watching.log import Log


class Service(Protocol):
    name: str

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder of the log."""

    name = "TensorBoard"

    def __init__(self, log: Log, about: Mapping[str, Any]) -> None:
        self._meanings = about["columns"]
        self._writer = _imported("tensorboard.summary", "tensorboard").Writer(str(log.folder))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name != "step":
                self._writer.add_scalar(f"quell/{name}", value, step, description=self._meanings[name])
        self._writer.flush()  # a crash must not lose what the file has

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The run that is active, or one of its own, which a resumed run goes on with."""

    name = "Weights & Biases"

    def __init__(self, log: Log, about: Mapping[str, Any]) -> None:
        wandb = _imported("wandb", "wandb")
        self._own = wandb.run is None
        key = f"quell-{about['key']}"
        self._run = wandb.run or wandb.init(project=log.wandb, id=key, resume="allow", dir=str(log.folder))
        self._run.config.update({"quell": dict(about)}, allow_val_change=True)
        self._run.define_metric("quell/step")
        self._run.define_metric("quell/*", step_metric="quell/step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"quell/{name}": value for name, value in numbers.items()})

    def close(self) -> None:
        if self._own:
            self._run.finish()


def open_services(log: Log, about: Mapping[str, Any]) -> list[Service]:
    """Those that the log asks for."""
    found: list[Service] = []
    if log.tensorboard:
        found.append(TensorBoard(log, about))
    if log.wandb is not None:
        found.append(WeightsAndBiases(log, about))
    return found


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as missing:
        raise QuellError(f"a log for {extra} needs that package: pip install 'quell[{extra}]'") from missing
