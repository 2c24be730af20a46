"""Some objects must not leave the process or exist twice: a copy would carry the key away, or release a row again.

`pickle`, `copy`, `torch.save` and `multiprocessing` all ask an object for `__reduce_ex__`; this one answers no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from quell.errors import QuellError


def never_copied(reason: str) -> Callable[[Any, Any], NoReturn]:
    """A `__reduce_ex__` that refuses, saying why and what to do instead."""

    def refuse(self: Any, protocol: Any) -> NoReturn:
        raise QuellError(reason)

    return refuse
