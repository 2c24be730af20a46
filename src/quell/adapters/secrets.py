"""The key of a run and where its ledger lies."""

from __future__ import annotations

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
        kept = kept or path.with_name(path.name + ".ledger")
        if not path.exists():
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
