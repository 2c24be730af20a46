"""Batches, arguments and outputs are tensors in mappings, lists, tuples and dataclasses: what is in them, and changed.

torch's own pytree takes a Hugging Face `BatchEncoding`, any other mapping that is no `dict`, and every dataclass for a
single value. What is found must be what can be changed, so both rest on one function, `opened`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves(value: Any) -> Iterator[Any]:
    """What is in a structure, in its order. A list of texts, one for each example, is one value."""
    found = opened(value)
    if found is None:
        yield value
        return
    for part in found[0]:
        yield from leaves(part)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure, of the same types, with every one of its leaves changed by the function."""
    found = opened(value)
    if found is None:
        return function(value)
    parts, with_parts = found
    return with_parts([mapped(function, part) for part in parts])


def opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The parts of a structure, and a function from other parts to such a structure; None for a leaf."""
    if isinstance(value, Tensor) or is_texts(value):
        return None
    if isinstance(value, Mapping):
        return list(value.values()), partial(_mapping_like, value)
    if isinstance(value, (list, tuple)):
        kind = type(value)
        return list(value), (lambda parts: kind(*parts)) if hasattr(value, "_fields") else kind
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value)], partial(_dataclass_like, value)
    if type(value) not in pytree.SUPPORTED_NODES:  # of types that others have registered
        return None
    parts, structure = pytree.tree_flatten(value)
    return parts, partial(pytree.tree_unflatten, treespec=structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def is_texts(value: Any) -> bool:
    """Whether this is a list of texts, which is one leaf."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(part, (str, bytes)) for part in value)


def _mapping_like(given: Mapping[Any, Any], values: list[Any]) -> Any:
    """A copy that has these values: a BatchEncoding keeps its methods, a defaultdict its default."""
    if type(given) is dict or not isinstance(given, MutableMapping):
        return dict(zip(given, values, strict=True))
    made = copy.copy(given)
    for key, value in zip(given, values, strict=True):
        made[key] = value
    return made


def _dataclass_like(given: Any, values: list[Any]) -> Any:
    made = copy.copy(given)
    for each, value in zip(fields(given), values, strict=True):
        object.__setattr__(made, each.name, value)  # also if it is frozen
    return made
