"""Arrays of examples and labels, from an .npz file or a folder of .npy files; every mistake gets one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell import files
from quell.errors import QuellError

Array = NDArray[Any]
MOST_BYTES = 1 << 36  # small models are for small data
_NAMES = ("x", "y", "x_test", "y_test")
_FORMAT = 'save it with numpy.savez("data.npz", x=..., y=...), or as x.npy and y.npy in a folder'


def read(path: Path) -> dict[str, Array]:
    """The arrays x, y, x_test, y_test, as far as they are there, of an .npz file or a folder with x.npy and so on."""
    if path.is_dir():
        named = {each.stem.lower(): each for each in sorted(path.glob("*.npy")) if each.stem.lower() in _NAMES}
        return {name: _opened(file)[""] for name, file in named.items()}
    found = _opened(path)
    if "" in found:
        raise QuellError(f"{path} holds one array and no names: {_FORMAT}")
    return found


def _opened(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file by name; the one of an .npy file without a name."""
    try:
        with files.opened(path, MOST_BYTES) as file:  # np.load would leave a broken file open
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                return {"": content}
            return {name: _member(content, name) for name in _NAMES if name in content.files}
    except QuellError:
        raise
    except FileNotFoundError:
        raise QuellError(f"there is no file {path}") from None
    except OSError as problem:
        raise QuellError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except files.DAMAGED_ARRAYS as problem:
        if "pickle" in str(problem) and path.suffix == ".npy":
            raise _objects(path.stem) from None
        raise QuellError(f"{path} is not an {path.suffix or '.npz'} file of arrays: {_FORMAT}") from None


def _member(content: np.lib.npyio.NpzFile, name: str) -> Array:
    try:
        return np.asarray(content[name])
    except ValueError as refusal:
        if "pickle" not in str(refusal):
            raise QuellError(f"{name} is damaged: {refusal}") from None
        raise _objects(name) from None
    except MemoryError:
        raise QuellError(f"{name} does not fit into the memory of this machine: use fewer examples") from None
    except (OSError, *files.DAMAGED_ARRAYS) as problem:
        raise QuellError(f"{name} is damaged: {problem}; save the file again") from None


def _objects(name: str) -> QuellError:
    return QuellError(
        f"{name} is an array of Python objects, which could run code when it is read: save numbers instead, "
        f"{name}.astype(float)"
    )


def pair(
    arrays: dict[str, Array], x_name: str, y_name: str, limits: tuple[float, float] | None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Examples and labels that belong together."""
    for name, other in ((x_name, y_name), (y_name, x_name)):
        if name not in arrays:
            found = ", ".join(arrays) or "none of the names that are needed"
            raise QuellError(f"{name} is missing beside {other}, and there is {found}: {_FORMAT}")
    x, y = examples(x_name, arrays[x_name], limits), _labels(y_name, arrays[y_name])
    if len(x) != len(y):
        raise QuellError(f"{x_name} has {len(x):,} examples and {y_name} {len(y):,} labels: there must be one for each")
    return x, y


def examples(name: str, array: Array, limits: tuple[float, float] | None) -> NDArray[np.float32]:
    """Examples as the models take them: bytes are pixels; other numbers are scaled by the given limits, if any."""
    if array.dtype.kind not in "fiub":
        raise QuellError(f"{name} has type {array.dtype}: save real numbers")
    if not 2 <= array.ndim <= 4 or 0 in array.shape[1:]:
        raise QuellError(
            f"{name} has shape {array.shape}: use (examples, features), or (examples, height, width) with channels "
            "first or last or none"
        )
    if array.dtype == np.uint8 and limits is None:
        array = array / 255  # pixels; a scale that does not depend on the data
    with np.errstate(over="ignore"):
        numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        where = np.argwhere(~np.isfinite(numbers))[0]
        raise QuellError(f"{name}[{', '.join(map(str, where))}] is not a finite number: clean the data first")
    if limits is not None:
        numbers = _within(numbers, *limits)
    return _channels_first(numbers) if array.ndim > 2 else numbers


def _within(numbers: NDArray[np.float32], low: float, high: float) -> NDArray[np.float32]:
    """Numbers from low to high, as -1 to 1; what lies outside is moved to the nearer end."""
    scaled: NDArray[np.float32] = np.clip((2 * numbers - (low + high)) / (high - low), -1, 1).astype(np.float32)
    return scaled


def _labels(name: str, array: Array) -> NDArray[np.int64]:
    """Labels as integers from 0."""
    if array.dtype.kind not in "iu":
        raise QuellError(f"{name} has type {array.dtype}: labels must be integers from 0, {name}.astype(int)")
    if array.ndim != 1:
        raise QuellError(f"{name} has shape {array.shape}: labels are one integer per example, {name}.ravel()")
    if array.size and array.min() < 0:
        raise QuellError(f"{name} has labels from {array.min()}: number the classes from 0")
    return array.astype(np.int64)


def _channels_first(images: NDArray[np.float32]) -> NDArray[np.float32]:
    if images.ndim == 3:
        return images[:, None]
    last = images.shape[3] <= 4 < images.shape[1]
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if last else images
