"""Read arrays from an .npz file, check them and split them; every mistake in the file gets one clear error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell import files
from quell.errors import QuellError

_MOST_CLASSES = 10_000
_MOST_BYTES = 1 << 36  # small models are for small data
_TEST_SHARE, _VALIDATION_SHARE = 0.25, 0.15
_FORMAT = 'save it with numpy.savez("data.npz", x=..., y=...)'


@dataclass(frozen=True)
class Part:
    """Examples (float32) and their labels (int64)."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def cut(self, share: float) -> tuple[Part, Part]:
        """Split off a share of the examples as a second part: always the same positions, whatever the data are."""
        order = np.random.default_rng(0).permutation(len(self))
        kept, taken = np.split(order, [len(self) - round(share * len(self))])
        return Part(self.x[kept], self.y[kept]), Part(self.x[taken], self.y[taken])


@dataclass(frozen=True)
class Data:
    """Examples to train on, to choose learning rates on (empty if there is no choice), and to report accuracy on."""

    train: Part
    validation: Part
    test: Part
    classes: int
    own_test: bool  # whether the file has test arrays

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return self.train.x.shape[1:]


def load(path: str | Path, validate: bool) -> Data:
    """Read x, y and perhaps x_test, y_test; hold a quarter out for tests if they are missing.

    With `validate` 15% of the training examples are held out as well, to choose a learning rate on.
    """
    arrays = _read(Path(path))
    train = _part(arrays, "x", "y")
    own_test = "x_test" in arrays or "y_test" in arrays
    if own_test:
        test = _part(arrays, "x_test", "y_test")
        if test.x.shape[1:] != train.x.shape[1:]:
            raise QuellError(
                f"examples of x_test have shape {test.x.shape[1:]} and those of x {train.x.shape[1:]}: they must agree"
            )
    else:
        train, test = train.cut(_TEST_SHARE)
    classes = 1 + int(max(part.y.max(initial=0) for part in (train, test)))
    train, validation = train.cut(_VALIDATION_SHARE if validate else 0.0)
    for part, what in ((train, "train on"), (test, "test on"), *([(validation, "choose on")] if validate else [])):
        if len(part) < 2:
            raise QuellError(f"{path} leaves {len(part)} examples to {what}: add more")
    return Data(train, validation, test, classes, own_test)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with files.opened(path, _MOST_BYTES) as file:  # np.load would leave a broken file open
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise QuellError(f"{path} holds one array and no names: {_FORMAT}")
            return {name: _array(content, name) for name in ("x", "y", "x_test", "y_test") if name in content.files}
    except QuellError:
        raise
    except FileNotFoundError:
        raise QuellError(f"there is no file {path}") from None
    except OSError as problem:
        raise QuellError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except files.DAMAGED_ARRAYS:
        raise QuellError(f"{path} is not an .npz file: {_FORMAT}") from None


def _array(content: np.lib.npyio.NpzFile, name: str) -> NDArray[Any]:
    try:
        return np.asarray(content[name])
    except ValueError as refusal:
        if "pickle" not in str(refusal):
            raise QuellError(f"{name} is damaged: {refusal}") from None
        raise QuellError(
            f"{name} is an array of Python objects, which could run code when it is read: save numbers instead, "
            f"{name}.astype(float)"
        ) from None
    except MemoryError:
        raise QuellError(f"{name} does not fit into the memory of this machine: use fewer examples") from None
    except (OSError, *files.DAMAGED_ARRAYS) as problem:
        raise QuellError(f"{name} is damaged: {problem}; save the file again") from None


def _part(arrays: dict[str, NDArray[Any]], x_name: str, y_name: str) -> Part:
    for name, other in ((x_name, y_name), (y_name, x_name)):
        if name not in arrays:
            found = ", ".join(arrays) or "none of the names it needs"
            raise QuellError(f"{name} is missing beside {other}, the file has {found}: {_FORMAT}")
    x, y = _examples(x_name, arrays[x_name]), _labels(y_name, arrays[y_name])
    if len(x) != len(y):
        raise QuellError(f"{x_name} has {len(x):,} examples and {y_name} {len(y):,} labels: there must be one for each")
    return Part(x, y)


def _examples(name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind not in "fiub":
        raise QuellError(f"{name} has type {array.dtype}: save real numbers")
    if not 2 <= array.ndim <= 4 or 0 in array.shape[1:]:
        raise QuellError(
            f"{name} has shape {array.shape}: use (examples, features), or (examples, height, width) with channels "
            "first or last or none"
        )
    if array.dtype == np.uint8:
        array = array / 255  # pixels; a scale that does not depend on the data
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        where = np.argwhere(~np.isfinite(numbers))[0]
        raise QuellError(f"{name}[{', '.join(map(str, where))}] is not a finite number: clean the data first")
    return _channels_first(numbers) if array.ndim > 2 else numbers


def _channels_first(images: NDArray[np.float32]) -> NDArray[np.float32]:
    if images.ndim == 3:
        return images[:, None]
    last = images.shape[3] <= 4 < images.shape[1]
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images


def _labels(name: str, array: NDArray[Any]) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise QuellError(f"{name} has type {array.dtype}: labels must be integers from 0, {name}.astype(int)")
    if array.ndim != 1:
        raise QuellError(f"{name} has shape {array.shape}: labels are one integer per example, {name}.ravel()")
    if array.size and not (array.min() >= 0 and array.max() < _MOST_CLASSES):
        raise QuellError(
            f"{name} has labels from {array.min()} to {array.max()}: number the classes from 0, at most "
            f"{_MOST_CLASSES:,} of them"
        )
    return array.astype(np.int64)
