"""What long computations say while they run, to whoever listens.

Optimisers call `announce`; the command line listens and draws a progress bar. Nobody has to pass a callback
through the rooms in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("quell_progress", default=None)


def announce(text: str) -> None:
    """Tell the listener, if there is one, what is going on."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear every announcement made inside the block.

    >>> with listening(print):
    ...     announce("band: iteration 3")
    band: iteration 3
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
