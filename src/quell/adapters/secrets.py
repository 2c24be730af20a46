"""The key of a run and where its ledger lies."""

from __future__ import annotations

import warnings
from itertools import count
from pathlib import Path

from quell.adapters.choice import require_one_source
from quell.errors import QuellError
from quell.noise import Key, Ledger


def opened(key: Key | str | Path | None, seed: int | None, ledger: str | Path | None) -> tuple[Key, Path | None]:
    """The key that was given, read from its file, drawn, or made from a seed; and the path of its ledger, if any.

    A path names the key's file. If it does not exist, the key is drawn and saved there, with a ledger beside it.
    """
    require_one_source(key, seed)
    kept = None if ledger is None else Path(ledger)
    if seed is not None:
        return Key.from_seed(seed), kept
    if isinstance(key, (str, Path)):
        path = Path(key)
        kept = kept or _ledger_of(path)
        if not path.exists():
            if kept.exists() and _released(kept) != 0:
                raise QuellError(
                    f"the key {path} is missing, but its ledger {kept} knows of steps that it released: restore the "
                    "key, or move the ledger away to start a new run with a new key"
                )
            Ledger(kept).close()  # before the key, which is not to be used without it
            Key.generate().save(path)
        elif not kept.exists():
            raise QuellError(
                f"the key {path} is there, but not its ledger {kept}, which knows the steps it has released: "
                "restore the ledger, or move the key away to start a new run with a new key"
            )
        key = Key.load(path)
    elif key is not None and not isinstance(key, Key):  # the value stays unnamed
        raise QuellError(f"key is a {type(key).__name__}: pass the path of its file, or a Key such as Key.generate()")
    return key or Key.generate(), kept


def set_aside(path: Path) -> None:
    """Make room for a new key. One that was used stays, with its ledger, under a number: what it released is out."""
    if not path.exists():
        return
    released = _released(_ledger_of(path))
    if released == 0:
        path.unlink()
        _ledger_of(path).unlink(missing_ok=True)
        return
    free = next(each for number in count(1) if not (each := path.with_name(f"{path.name}.{number}")).exists())
    if _ledger_of(path).exists():
        _ledger_of(path).rename(_ledger_of(free))
    path.rename(free)
    steps = "steps" if released is None else f"{released:,} step{'s' if released > 1 else ''}"
    warnings.warn(
        f"an earlier run has released {steps} with the key {path}, and this is a second run on the data: the promises "
        f"of both add up. To go on with the earlier one instead, pass resume_from_checkpoint=True. Its key is {free} "
        "now: rename it and its ledger back before that",
        stacklevel=5,
    )


def _released(ledger: Path) -> int | None:
    """How many steps; None where that cannot be read."""
    try:
        with Ledger(ledger) as found:
            return found.released
    except QuellError:  # damaged, or in use
        return None


def _ledger_of(key: Path) -> Path:
    return key.with_name(key.name + ".ledger")
