"""A trained model as one file, with all that is needed to use it: its kind, its classes, and how examples were encoded.

Nothing in it comes from the data except the weights, which the promise covers.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quell import files
from quell.errors import QuellError
from quell.train import arrays, table
from quell.train.data import Data
from quell.train.models import build
from quell.train.table import Columns

NAME = "model.pt"
_FORMAT = "quell model 1"
_MOST_BYTES = 1 << 34


@dataclass(frozen=True)
class Model:
    """A model that `quell train` made.

    >>> Model.load("my-model")  # the folder that quell train wrote
    Traceback (most recent call last):
    quell.errors.QuellError: there is no file my-model: give the folder that quell train wrote
    """

    network: nn.Module
    kind: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    columns: Columns | None
    limits: tuple[float, float] | None

    @classmethod
    def of(cls, network: nn.Module, kind: str, data: Data) -> Model:
        """The trained network with what the data's description says."""
        return cls(network, kind, data.shape, data.classes, data.columns, data.limits)

    def save(self, path: Path) -> None:
        about = {"kind": self.kind, "shape": self.shape, "classes": self.classes, "limits": self.limits}
        columns = None if self.columns is None else self.columns.as_plain()
        torch.save({"format": _FORMAT, **about, "columns": columns, "weights": self.network.state_dict()}, path)

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """The model in a file, or in the folder that `quell train` wrote. Reading it runs no code from it."""
        path = Path(path)
        file = path / NAME if path.is_dir() else path
        try:
            with files.opened(file, _MOST_BYTES) as opened:
                content: dict[str, Any] = torch.load(opened, weights_only=True)
            if content["format"] != _FORMAT:
                raise ValueError
            columns = None if content["columns"] is None else Columns.from_plain(content["columns"])
            kind, shape, classes = content["kind"], tuple(content["shape"]), tuple(content["classes"])
            network = build(kind, shape, len(classes), columns)
            network.load_state_dict(content["weights"])
        except FileNotFoundError:
            raise QuellError(f"there is no file {file}: give the folder that quell train wrote") from None
        except OSError as problem:
            raise QuellError(f"cannot read {file}: {problem.strerror or problem}") from problem
        except (ValueError, TypeError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError):
            raise QuellError(f"{file} is not a model that this version of quell train wrote") from None
        return cls(network, kind, shape, classes, columns, content["limits"])

    def predict(self, path: str | Path) -> list[tuple[str, float]]:
        """The most likely class of each example in a file, and its probability.

        Args:
            path: A table with the columns that the model was trained with, or arrays: x of an .npz file or folder.

        Returns:
            (class, probability) for each example, in the order of the file.
        """
        path = Path(path)
        if self.columns is not None:
            x = table.encoded(path, self.columns)
        else:
            found = arrays.read(path)
            if "x" not in found:
                raise QuellError(f"{path} has no array x: it holds the examples to predict")
            x = arrays.examples("x", found["x"], self.limits)
            if x.shape[1:] != self.shape:
                raise QuellError(f"examples of x have shape {x.shape[1:]}, but the model was trained with {self.shape}")
        with torch.no_grad():
            parts = [
                self.network(part).softmax(1).max(1) for part in torch.from_numpy(np.ascontiguousarray(x)).split(1000)
            ]
        return [
            (self.classes[place], probability)
            for part in parts
            for probability, place in zip(part.values.tolist(), part.indices.tolist(), strict=True)
        ]
