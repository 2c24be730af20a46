"""Child processes that need not import torch again: forked before any thread was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable


def fork(work: Callable[[], None]) -> int:
    """The id of a child that does the work and exits, with 1 if it fails."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_all(children: list[int]) -> bool:
    """Whether all succeed; as soon as one does not, the others are ended, because they may wait for it."""
    left = set(children)
    sound = True
    while left:
        child, status = os.wait()
        left.discard(child)
        if status and sound:
            sound = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return sound


def run_script(*arguments: object, timeout: float) -> None:
    """Run a script and everything it forks; a hang or a failure is an error, and nothing is left behind."""
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        assert process.wait(timeout) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
