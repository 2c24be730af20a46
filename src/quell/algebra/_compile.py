"""Numba's `njit` as Quell uses it: compiled at the first call unless a signature is given, and cached on disk.

A read-only install in a container without a writable home has no place for numba's cache, and numba refuses there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(*signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: contraction of multiply and add is allowed, nothing else that could change a result."""
    settings = {"fastmath": {"contract"}, "error_model": "numpy", "nogil": True, **options}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(*signature, cache=True, **settings)(function)
        except RuntimeError:
            return njit(*signature, **settings)(function)

    return decorate
