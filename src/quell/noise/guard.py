"""Says no to a step whose noise was released before, in this process (`claims`) or in an earlier one (`ledger`)."""

from __future__ import annotations

from quell.errors import QuellError
from quell.noise import claims
from quell.noise.key import Key
from quell.noise.layout import Shard
from quell.noise.ledger import Ledger

REPLAY = (
    "if the same gradients come again because the data order is the plan's own, load with replay=True; "
    "otherwise start a new key"
)


class ReleaseGuard:
    """What one stream may release of these shards. `replay` declares that repeated steps see the same gradients."""

    def __init__(self, key: Key, shards: tuple[Shard, ...], ledger: Ledger | None, replay: bool = False) -> None:
        self.shards, self.ledger = shards, ledger
        self._key, self._replay = key, replay
        self._claim = claims.register(key, shards)
        self._fresh = False  # whether the next step is known not to have been released before

    @property
    def released(self) -> int:
        """How many steps count as released, without those that an open ledger has merely reserved."""
        known = 0 if self.ledger is None else self.ledger.accounted(self._key.id)
        return max(known, claims.released(self._key, self._claim))

    def before(self, step: int, until: int) -> None:
        """Note, before it happens, that the steps from `step` to below `until` are released, or refuse."""
        if step >= self.released:
            self._replay = False  # what was declared covers the steps that come again, not the new ones
        if not self._fresh:
            self._require_new(step, self._replay)
        elif not self._replay and step < claims.released_by_others(self._key, self._claim):
            raise QuellError(f"another stream with this key has released step {step:,} already: {REPLAY}")
        if self.ledger is not None:
            self.ledger.record(self._key.id, until)
        self._claim.released = max(until, self._claim.released)
        self._fresh = False  # should it fail half-way, the step counts as released

    def after(self) -> None:
        """The step succeeded; the next one is new."""
        self._fresh = True

    def check_resuming(self, step: int, replay: bool) -> None:
        """Refuse to go on from `step` if that would release steps again, or if the ledger is not that of the run."""
        self._require_new(step, replay)
        if self.ledger is not None and not replay and (known := self.ledger.released(self._key.id)) < step:
            raise QuellError(
                f"the ledger {self.ledger.path} has {known:,} steps of this key, but the state stands at step "
                f"{step:,}: restore the run's own ledger; if it has none, enter what was released: "
                "with Ledger(path) as ledger: ledger.record(key.id, steps)"
            )

    def resumed(self, replay: bool) -> None:
        """The stream stands where `check_resuming` allowed it to."""
        self._replay, self._fresh = replay, True

    def _require_new(self, step: int, replay: bool) -> None:
        before = claims.released(self._key, self._claim)
        if self.ledger is not None:
            before = max(before, self.ledger.released(self._key.id))
        if step < before and not replay:
            raise QuellError(
                f"this key has released steps up to {before - 1:,}, and step {step:,} would come again: {REPLAY}"
            )
