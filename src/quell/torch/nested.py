"""Batches, arguments and outputs are tensors in mappings, lists, tuples and dataclasses: what is in them, and changed.

torch's own pytree takes a Hugging Face `BatchEncoding`, any other mapping that is no `dict`, and every dataclass for a
single value. What is found here must be what is changed here, so all who look into batches use these two functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves(value: Any) -> Iterator[Any]:
    """What is in a structure, in its order. A list of texts, one for each example, is one value."""
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif _is_sequence(value):
        parts = value
    elif _has_fields(value):
        parts = (getattr(value, each.name) for each in fields(value))
    else:
        yield from [value] if _is_leaf(value) else pytree.tree_leaves(value)  # of types that others have registered
        return
    for part in parts:
        yield from leaves(part)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure, of the same types, with every one of its leaves changed by the function."""
    if isinstance(value, Mapping):
        made = {key: mapped(function, part) for key, part in value.items()}
        return _with(value, made) if isinstance(value, MutableMapping) and type(value) is not dict else made
    if _is_sequence(value):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _has_fields(value):
        made = copy.copy(value)
        for each in fields(value):
            object.__setattr__(made, each.name, mapped(function, getattr(value, each.name)))  # also if it is frozen
        return made
    return function(value) if _is_leaf(value) else pytree.tree_map(function, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def is_texts(value: Any) -> bool:
    """Whether this is a list of texts, which is one leaf."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(part, (str, bytes)) for part in value)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or is_texts(value)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not is_texts(value)


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _with(mapping: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """A copy that has these values: a BatchEncoding keeps its methods, a defaultdict its default."""
    made = copy.copy(mapping)
    for key, value in values.items():
        made[key] = value
    return made
