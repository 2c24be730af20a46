"""The attacks' own tests: torch on one thread, as in tests/pytorch."""

from __future__ import annotations

from tests.pytorch.conftest import one_thread

__all__ = ["one_thread"]
