"""The key of a run and where its ledger lies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
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


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """Make room for a new key, unless what is done inside the `with` fails: then the old one is back as it was.

    A key that was used stays, with its ledger, under a number: what it released is out.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        yield
        return
    aside = next(_unused_names(path))
    _rename(path, aside)
    try:
        yield
    except BaseException:
        _remove(path)
        _rename(aside, path)
        raise
    released = _released(_ledger_of(aside))
    if released == 0:
        _remove(aside)
        return
    steps = "steps" if released is None else f"{released:,} step{'s' if released > 1 else ''}"
    warnings.warn(
        f"an earlier run has released {steps} with the key {path}, and this is a second run on the data: the promises "
        f"of both add up. To go on with the earlier one instead, pass resume_from_checkpoint=True. Its key is {aside} "
        "now: rename it and its ledger back before that",
        stacklevel=10,
    )


def require_there(path: Path) -> None:
    """Refuse to resume a run without its key, which may have been set aside."""
    if path.exists():
        return
    found = path.parent.glob(f"{escape(path.name)}.*")
    others = sorted((each for each in found if each.suffix[1:].isdigit()), key=lambda each: int(each.suffix[1:]))
    names = ", ".join(each.name for each in others)
    kept = f" ({names} beside it: of earlier runs, set aside when a new one began)" if others else ""
    raise QuellError(
        f"the key {path} of the run is missing{kept}: restore it and its ledger under that name, or pass the "
        "key, private={'key': ...}"
    )


def _unused_names(path: Path) -> Iterator[Path]:
    for number in count(1):
        free = path.with_name(f"{path.name}.{number}")
        if not free.exists() and not _ledger_of(free).exists():
            yield free


def _rename(key: Path, new: Path) -> None:
    """The ledger first, before which a key is not to be used."""
    if _ledger_of(key).exists():
        _ledger_of(key).rename(_ledger_of(new))
    key.rename(new)


def _remove(key: Path) -> None:
    key.unlink(missing_ok=True)
    _ledger_of(key).unlink(missing_ok=True)


def _released(ledger: Path) -> int | None:
    """How many steps; None where that cannot be read, as of a ledger that is lost."""
    if not ledger.exists():
        return None
    try:
        with Ledger(ledger) as found:
            return found.released
    except QuellError:  # damaged, or in use
        return None


def _ledger_of(key: Path) -> Path:
    return key.with_name(key.name + ".ledger")
