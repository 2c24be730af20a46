"""Function calls on all cores at once, whose results do not depend on how many cores there are."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController

from quell.progress import announce


def side_by_side(jobs: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Results of function calls, given as (function, *arguments), in their order.

    Calls run on all cores, so each multiplies its matrices on one thread, and sums never depend on how many there are.
    Each result is announced, and whoever listens may end the rest by raising.
    """
    found = []
    with _libraries().limit(limits=1), ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        started = [workers.submit(*job) for job in jobs]
        try:
            for job in started:
                found.append(job.result())
                announce(f"accounting: part {len(found):,} of {len(started):,}")
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    return found


@cache
def _libraries() -> ThreadpoolController:
    """The libraries that multiply matrices here, looked for once, because that takes milliseconds."""
    importlib.import_module("scipy.linalg.blas")  # which has one of its own
    return ThreadpoolController()
