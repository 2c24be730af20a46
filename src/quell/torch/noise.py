"""A plan's noise for torch tensors: `add_` adds the row of this step to the clipped gradient sums, in place.

Every element of every parameter has its own noise, numbered over the *unsharded* tensor, so ranks that hold the
same element agree on its noise and ranks that hold different ones draw nothing twice: whatever the world size, a step
gets exactly one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quell.adapters.choice import described, refuse_user_level, require_clip_norm, require_one_source, select
from quell.errors import QuellError
from quell.noise import Key, Ledger, NoiseSpec, NoiseStream
from quell.noise.stream import Agreement
from quell.schemes import Batches
from quell.torch.sharding import local, shard_of

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan

Tensors = Mapping[str, Tensor] | Iterable[Tensor]


class CorrelatedNoise:
    """A plan's noise for torch tensors: row t of max_grad_norm·σ·C⁻¹Z at step t, with σ and C from the plan.

    Give `add_` the *sums* of clipped gradients over the batch, and divide by the expected batch size afterwards.

    Args:
        plan: The plan, or one mechanism or `NoiseSpec` of it.
        params: The trainable parameters, as a mapping or an iterable whose order never changes. Of FSDP2's DTensors
            each rank gets the noise of its own slice.
        max_grad_norm: The norm to which each example's gradient was clipped.
        mechanism: Another certified mechanism of the plan than the recommended one, by name or as an object.
        key: The secret key. Default: a new one from the operating system.
        seed: Makes the noise repeatable and voids the promise: for tests.
        generator: "chacha20", "chacha8" (faster, smaller security margin) or "philox" (not secure).
        memory: Model copies that may be kept to save time.
        ledger: A ledger, or the path of one, that records released steps.
        replay: Whether steps that the ledger knows may be repeated with the same gradients.
        agree: Compares settings between ranks; `make_private` passes it.

    >>> import quell, torch
    >>> plan = quell.plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5)
    >>> noise = CorrelatedNoise(plan, {"w": torch.zeros(300, 10)}, max_grad_norm=1.0)
    >>> summed = {"w": torch.zeros(300, 10)}
    >>> noise.add_(summed)
    >>> noise.step, bool(summed["w"].std() > 0), len(noise.batches(examples=1000))
    (1, True, 30)
    """

    def __init__(
        self,
        plan: Plan | Mechanism | NoiseSpec,
        params: Tensors,
        max_grad_norm: float | None = None,
        *,
        mechanism: str | Mechanism | None = None,
        key: Key | None = None,
        seed: int | None = None,
        generator: str = "chacha20",
        memory: float = 0.0,
        ledger: Ledger | str | Path | None = None,
        replay: bool = False,
        agree: Agreement | None = None,
    ) -> None:
        require_one_source(key, seed)
        refuse_user_level(plan)
        chosen = select(plan, mechanism)
        self._source = plan, chosen
        self.max_grad_norm = max_grad_norm if isinstance(plan, NoiseSpec) else _clip_norm(max_grad_norm)
        self.key = key or (Key.generate() if seed is None else Key.from_seed(seed))
        self._names = tuple(params) if isinstance(params, Mapping) else None
        tensors = tuple(params.values()) if isinstance(params, Mapping) else tuple(params)
        self._parameters = described(self._names, tensors)
        spec = NoiseSpec.of(chosen, self.max_grad_norm)
        self._stream = NoiseStream(
            replace(spec, promise=f"{spec.promise} {self._parameters}"),
            shards=[shard_of(number, tensor) for number, tensor in enumerate(tensors)],
            key=self.key,
            generator=generator,
            memory=memory,
            ledger=ledger,
            replay=replay,
            agree=agree,
        )

    @property
    def step(self) -> int:
        """The step that is due, counted from 0: how many rows have been added."""
        return self._stream.step

    @property
    def steps(self) -> int:
        """How many steps the plan covers."""
        return self._stream.steps

    @property
    def released(self) -> int:
        """How many steps count as released under this key, by this run or an earlier one that the ledger knows."""
        return min(self._stream.released, self.steps)

    def batches(self, examples: int) -> Batches:
        """The batches that the plan's promise is about, drawn from this noise's key, for a data set of that size."""
        from quell.adapters.scheme import batches_of, scheme_of  # need the accountants

        plan: Any
        plan, chosen = self._source
        if not hasattr(plan, "mechanisms"):
            raise QuellError("batches are the plan's: make the noise from a Plan, not from a mechanism or a NoiseSpec")
        if examples != plan.run.examples:
            raise QuellError(f"the data has {examples:,} examples, but the plan is for {plan.run.examples:,}")
        return batches_of(plan, scheme_of(plan, chosen), self.key)

    @property
    def scale(self) -> float:
        """The standard deviation of a fresh draw: max_grad_norm · σ."""
        return self._stream.spec.scale

    @property
    def generator(self) -> str:
        """What makes normals of the key: "chacha20", "chacha8" or "philox"."""
        return self._stream.generator

    @property
    def buffers(self) -> int:
        """Model-sized float32 vectors kept between steps (those that `memory` allows, from the first step on)."""
        return self._stream.buffers

    def add_(self, grads: Tensors) -> None:
        """Add this step's row to the clipped gradient sums in place, and go on to the next step."""
        self._stream.add_([local(tensor) for tensor in self._ordered(grads)])

    def state_dict(self) -> dict[str, Any]:
        """Step, buffers and names of plan and key; the key itself is saved apart, with `key.save(path)`."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, replay: bool = False) -> None:
        """Go on from a saved state, or from those of all ranks of a checkpoint; see `NoiseStream.load_state_dict`."""
        states = [state] if isinstance(state, Mapping) else list(state)
        self._stream.reshard(self._stream.shards, states, replay=replay)

    def settings(self) -> dict[str, Any]:
        """What ranks that make this noise together must agree on."""
        return {
            "max_grad_norm": self.max_grad_norm,
            "parameters": self._parameters,
            "generator": self.generator,
            "fingerprint": self._stream.spec.fingerprint,
        }

    def close(self) -> None:
        """Let go of the ledger; no more steps are released."""
        if self._stream.ledger is not None:
            self._stream.ledger.close()

    def _ordered(self, grads: Tensors) -> list[Tensor]:
        if self._names is None or not isinstance(grads, Mapping):
            return list(grads.values()) if isinstance(grads, Mapping) else list(grads)
        if missing := [name for name in self._names if name not in grads]:
            raise QuellError(f"{missing[0]!r} has no gradient in this step: pass zeros, it still gets its noise")
        if unknown := [name for name in grads if name not in self._names]:
            raise QuellError(f"{unknown[0]!r} is not among the parameters this noise was made for")
        return [grads[name] for name in self._names]

    def __repr__(self) -> str:
        return f"<CorrelatedNoise step {self.step:,} of {self.steps:,}, {self.buffers} buffers, {self.key!r}>"


def _clip_norm(max_grad_norm: float | None) -> float:
    if max_grad_norm is None:
        raise QuellError("max_grad_norm is missing: it is what per-example gradients are clipped to")
    return require_clip_norm(max_grad_norm)
