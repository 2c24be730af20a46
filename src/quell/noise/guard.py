"""Says no to a step whose noise was released before, in this process (`claims`) or in an earlier one (`ledger`).

The one exception is a replay: the same release once more, which tells nothing new. Whether it is the same is not taken
on trust. A digest of every release is kept, and a step that comes again with another one is refused.
"""

from __future__ import annotations

from hashlib import blake2b
from threading import Lock

from quell.errors import QuellError
from quell.noise import claims
from quell.noise.key import Key
from quell.noise.layout import Shard
from quell.noise.ledger import Ledger
from quell.noise.releases import DIGEST_BYTES, UNKNOWN

REPLAY = (
    "if the same gradients come again because the data order is the plan's own, load with replay=True; "
    "otherwise start a new key"
)

_UNLOADED = (
    "load the checkpoint first (docs/resume.md), or start a new run with a new key (where there is no checkpoint, set "
    "the same seeds before building the model)"
)
_AFTER_LOADING = (
    "go on as before the crash, with the same learning-rate schedule, physical_batch_size (of PrivateTrainer "
    "per_device_train_batch_size), number of processes, devices, code and data (docs/resume.md says what else can "
    "differ), or from a checkpoint after which nothing was released, or start a new run with a new key"
)

_TURN = Lock()  # to look up what was released and note a step is one act, also where several threads ask


class ReleaseGuard:
    """What one stream may release of these shards. `run` names key and noise; `replay` lets released steps come again.

    A digest is keyed BLAKE2b of the run, the step and a fingerprint of the sums before noise, so who reads a
    ledger learns nothing from it.
    """

    def __init__(
        self, key: Key, run: str, shards: tuple[Shard, ...], ledger: Ledger | None, replay: bool = False
    ) -> None:
        self.shards, self.ledger = shards, ledger
        self._key, self._replay = key, replay
        self._digests = key.derive("quell release digests")
        self._run = self._digest(run.encode())
        self._claim = claims.register(key, shards)
        self._loaded = False  # whether the stream goes on from a saved state
        self._saved = 0  # how many steps were released when the state that was loaded was saved
        if ledger is not None:
            ledger.require_run(self._run)

    @property
    def watched(self) -> bool:
        """Whether anyone remembers what is released; keys made from a seed promise nothing."""
        return self.ledger is not None or not self._key.seeded

    @property
    def released(self) -> int:
        """How many steps count as released."""
        known = 0 if self.ledger is None else self.ledger.released
        return max(known, self._saved, *(made.released for made in claims.overlapping(self._key, self._claim)))

    def before(self, step: int, until: int, fingerprint: bytes | None) -> None:
        """Note, before it happens, that the steps from `step` to below `until` are released, or refuse.

        `fingerprint` is that of the sums of `step`; None where nobody can know it.
        """
        digest = UNKNOWN
        if fingerprint is not None:
            digest = self._digest(self._run, step.to_bytes(8, "little"), fingerprint)
        with _TURN:
            if step < self.released:
                self._require_new(step, self._replay)
                if self.watched:
                    self._require_same(step, digest)
            else:
                self._replay = False  # what was declared covers the steps that come again, not the new ones
            if self.ledger is not None:
                self.ledger.record(until, digest, self._run)
            if self._claim.made.digest(step) is None:
                self._claim.made.note(step, until, digest)

    def check_resuming(self, step: int, released: int, replay: bool) -> None:
        """Refuse to go on from `step` if that would release steps again, or if the ledger is not that of the run.

        `released` is how many steps had been released when the state was saved.
        """
        self._require_new(step, replay, released)
        if self.ledger is not None and (known := self.ledger.released) < released:
            raise QuellError(
                f"the ledger {self.ledger.path} has {known:,} steps of this key, but {released:,} were released when "
                "the state was saved: restore the run's own ledger; if it has none, enter what was released: "
                "with quell.noise.Ledger(path) as ledger: ledger.record(steps)"
            )

    def resumed(self, released: int, replay: bool) -> None:
        """The stream stands where `check_resuming` allowed it to."""
        self._loaded, self._saved, self._replay = True, max(released, self._saved), replay

    def _require_new(self, step: int, replay: bool, released: int = 0) -> None:
        before = max(released, self.released)
        if step < before and not replay:
            raise QuellError(
                f"this key has released steps up to {before - 1:,}, and step {step:,} would come again: {REPLAY}"
            )

    def _require_same(self, step: int, digest: bytes) -> None:
        """Everyone who knows what the step was released as must know this digest, and someone must know it."""
        known = [made.digest(step) for made in claims.overlapping(self._key, self._claim)]
        if self.ledger is not None and self.ledger.released > step:
            known.append(self.ledger.digest(step))
        witnesses = [found for found in known if found is not None]
        if not witnesses or UNKNOWN in (*witnesses, digest):
            raise QuellError(
                f"step {step:,} counts as released, and no ledger has a digest of it (there was none, its last record "
                "is torn, or a CUDA graph was captured), so nothing shows that it would be the same again: start a "
                "new run with a new key, and keep its ledger"
            )
        if any(found != digest for found in witnesses):
            raise QuellError(
                f"{_AFTER_LOADING if self._loaded else _UNLOADED}: step {step:,} was released before and would now be "
                "released with other gradients or other noise, so nothing was released"
            )

    def _digest(self, *parts: bytes) -> bytes:
        return blake2b(b"".join(parts), digest_size=DIGEST_BYTES, key=self._digests).digest()
