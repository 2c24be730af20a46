"""What a run keeps on the host, and the transformation that asks it.

What is traced and what stays on the host. The state is a pytree of the step, the buffers of those recurrences that have
any, and the name of the run; never the key. A step asks the host for the key by a callback, and the host answers after
it has noted the step: in the ledger, on the disk, if there is one. So the key is in no compiled program, and a step
whose noise may not be used gets no key: its updates are NaN, as are all that follow, and `check` says why.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell.adapters.choice import described
from quell.errors import QuellError
from quell.jax.alone import manual_axes
from quell.jax.devices import mesh_of, platform_of, refuse_recorded_cpus, refuse_shard_map
from quell.jax.given import require_floats
from quell.jax.normals import Source
from quell.jax.parts import on_parts, without_empty
from quell.jax.processes import counts_steps
from quell.jax.rows import Row, add_row
from quell.jax.slices import Slice
from quell.jax.state import REFUSALS, NoiseState
from quell.jax.watch import Watch
from quell.noise import Key, Ledger, NoiseSpec
from quell.noise.fingerprint import Fingerprint
from quell.noise.generators import key_words
from quell.noise.guard import ReleaseGuard
from quell.noise.layout import whole
from quell.noise.secrecy import never_copied
from quell.noise.stream import UNRECORDED, UnrecordedKeyWarning

f32, i32, u32 = jnp.float32, jnp.int32, jnp.uint32


class Host:
    """One run: its key, what it has released, and how its steps are traced."""

    def __init__(
        self,
        spec: NoiseSpec,
        params: Any,
        key: Key,
        generator: str,
        expected: float,
        ledger: Path | None,
        recorded: bool,
        watch: Watch | None,
        whose: str,
    ) -> None:
        """`recorded` says whether process 0 keeps a ledger, `ledger` where; `whose` names the users of a run."""
        named, self._tree = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in named]
        if not leaves:
            raise QuellError("params has no arrays: pass the parameters that are trained")
        if any(map(_is_masked, jax.tree_util.tree_leaves(params, is_leaf=_is_masked))):
            raise QuellError(
                "params has nodes that optax.masked or multi_transform left out, whose gradients would pass without "
                "noise: call privatize and clipped_grad with the trained parameters only, and no mask"
            )
        if expected <= 0:
            raise QuellError(f"expected_batch_size={expected:g} must be positive")
        self._slices = tuple(Slice.of(leaf) for leaf in leaves)
        meshes = {where.mesh for where in self._slices if where.mesh is not None}
        if len(meshes) > 1:
            raise QuellError("the parameters lie on different meshes: shard them all over one")
        self._mesh = next(iter(meshes), None)
        self._specs = [P() if where.spec is None else where.spec for where in self._slices]
        names = tuple(jax.tree_util.keystr(path) for path, _ in named)
        spec = replace(spec, promise=f"{spec.promise} {described(names, leaves)}{whose}")
        self.spec, self.key, self.generator = spec, key, generator
        self._recipe, self._expected = spec.recipe(), np.float32(expected)
        self._platform = platform_of(leaves)
        self.name = np.frombuffer(
            blake2b(f"{key.id} {spec.made_by(generator)}".encode(), digest_size=16).digest(), "<u4"
        )
        shards = whole(leaves)
        if ledger is None and key.loaded and not key.seeded:
            warnings.warn(UNRECORDED, UnrecordedKeyWarning, stacklevel=3)
        kept = None if ledger is None else Ledger(ledger)
        self._recorded, self.watch = recorded, watch
        try:
            self.guard = ReleaseGuard(key, spec.made_by(generator), shards, kept, replay=True)
        except QuellError:
            if kept is not None:
                kept.close()
            raise
        self._witness = None if kept is None else Fingerprint(key, shards, None)
        self._words = np.stack([key_words(generator, key, number) for number in range(len(leaves))])
        self._process = os.getpid()
        self._due = -1  # the step after those that were released here; negative before the first
        self._closed = False
        self._compiled = jax.jit(partial(self._update, ()))  # callbacks and shard_map want a traced program

    __reduce_ex__ = never_copied("a run holds a key and is never pickled or copied: save its state")

    def init(self, params: Any) -> NoiseState:
        self._leaves(params, [where.shape for where in self._slices])
        buffers = []
        for where in self._slices if self._recipe.buffers else ():
            sharding = None if where.mesh is None else NamedSharding(where.mesh, P(None, *where.spec))
            buffers.append(jnp.zeros((self._recipe.buffers, *where.shape), f32, device=sharding))
        replicated = None if self._mesh is None else NamedSharding(self._mesh, P())
        step, refused, run = (jax.device_put(each, replicated) for each in (np.int32(0), np.int32(0), self.name))
        return NoiseState(step, refused, run, tuple(buffers))

    def update(
        self, updates: Any, state: NoiseState, params: Any = None, *, norms: Any = None, **_: Any
    ) -> tuple[Any, NoiseState]:
        """As optax has it. `norms` are those of `clipped_grad(..., with_norms=True)`, for a log that wants them."""
        if not isinstance(state, NoiseState):
            raise QuellError(
                f"the state is a {type(state).__name__}, where update takes what this transformation's own init or "
                "update returned: for the state of an optax.chain, call the chain's update"
            )
        norms = None if self.watch is None else self.watch.wanted(norms)
        manual = manual_axes()
        if manual:
            return self._update(manual, updates, state, norms)
        means, after = self._compiled(updates, state, norms)
        return means, after

    def _update(
        self, manual: tuple[str, ...], updates: Any, state: NoiseState, norms: Array | None
    ) -> tuple[Any, NoiseState]:
        if manual:
            refuse_shard_map(manual, {axis for where in self._slices for axes in where.axes for axis in axes})
        shapes = [where.local if manual else where.shape for where in self._slices]
        sums = self._leaves(updates, shapes)
        if manual:
            sums = without_empty(sums)
        self._require_unchanged(state, shapes)
        for total in sums:
            if total.dtype.itemsize < 4:
                raise QuellError(
                    f"a sum has dtype {total.dtype}, and rounding sums to it can move them by more than the clip norm "
                    "when one unit is left out: pass them in float32, as clipped_grad returns them"
                )
        if self._recorded and self._platform == "cpu" and (mesh := mesh_of(sums)) is not None:
            refuse_recorded_cpus(mesh.size)
        code, keys, zero, expected = self._ask(manual, state, sums)
        refused = jnp.where(state.refused != 0, state.refused, code)

        def work(arrays: list[Array], step: Array, keys: Array, zero: Array) -> list[Array]:
            source, row = Source(self.generator, keys, zero), Row.of(self._recipe, step)
            own, kept = arrays[: len(sums)], arrays[len(sums) :]
            noisy, kept = add_row(self._recipe, source, self._slices, lax.axis_index, row, own, kept, self._platform)
            return [*noisy, *kept]

        buffers = list(state.buffers) if self._recipe.buffers else []
        if manual:
            buffers = without_empty(buffers)
        given = ([*sums, *buffers], state.step, keys, zero)
        if self._mesh is None or manual:
            made = work(*given)
        else:
            kept = [P(None, *spec) for spec in self._specs[: len(buffers)]]
            made = on_parts(work, self._mesh, [*self._specs, *kept], *given)
        noisy, buffers = made[: len(sums)], made[len(sums) :]
        sound = refused == 0
        if self.watch is not None:
            self.watch.tell(manual, state.step, noisy, sound, norms)
        means = [
            jnp.where(sound, released / expected, jnp.nan).astype(total.dtype)
            for released, total in zip(noisy, sums, strict=True)
        ]
        after = NoiseState(state.step + sound.astype(jnp.int32), refused, state.run, tuple(buffers) or state.buffers)
        return jax.tree_util.tree_unflatten(self._tree, means), after

    def require_whole(self, params: Any) -> None:
        """Refuse other parameters than those of the run, and slices of them, whose norm is not that of a unit."""
        shapes = [where.shape for where in self._slices]
        found = [jnp.shape(leaf) for leaf in jax.tree_util.tree_leaves(params)]
        if manual_axes() and len(found) == len(shapes) and found != shapes:
            raise QuellError(
                "the parameters have other shapes than in privatize, as slices of them do inside shard_map: a slice's "
                "norm is too small to clip a unit by, so gather sharded parameters (lax.all_gather(..., tiled=True)) "
                "before clipped_grad"
            )
        self._leaves(params, shapes)

    def _leaves(self, tree: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        leaves: list[Any]
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._tree:
            raise QuellError(
                "these are not the parameters that privatize was called with: pass the same tree, in order. To freeze "
                "some, call privatize and clipped_grad with the trained ones only: optax.masked and multi_transform "
                "let the gradients of others pass without noise"
            )
        require_floats(leaves)
        for leaf, shape in zip(leaves, shapes, strict=True):
            if tuple(leaf.shape) != tuple(shape):
                raise QuellError(f"a leaf has shape {tuple(leaf.shape)}, where privatize was given {tuple(shape)}")
        return leaves

    def _require_unchanged(self, state: NoiseState, shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse a state whose arrays are not as `init` makes them; those of other buffers would be read as noise."""
        count = self._recipe.buffers
        made = [((), i32), ((), i32), ((4,), u32), *(((count, *shape), f32) for shape in shapes if count)]
        given = [*state[:3], *(state.buffers if count else ())]
        if [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in given] != made:
            raise QuellError(
                "the state's arrays have other shapes or dtypes than init(params) gives them: restore checkpoints "
                "into the tree that init returns, and do not cast or stack it"
            )

    def _ask(self, manual: tuple[str, ...], state: NoiseState, sums: Sequence[Array]) -> tuple[Array, ...]:
        """The host's answer, from one device: refusal, keys, zero and the expected batch size.

        Question and answer are one array each: every array costs a copy between device and host.
        """
        shown: list[Array] = []
        if self._recorded:
            shown = [
                _unsharded(each, where) if manual else each for each, where in zip(sums, self._slices, strict=True)
            ]
        # Nothing of the sums goes along, but as theirs, so that sums that are mapped over ask once each.
        empty = (lax.slice(each, [0] * each.ndim, [0] * each.ndim) for each in sums)
        mark = sum((nothing.sum().astype(f32) for nothing in empty), f32(0))
        numbers = (state.step, state.refused, self._differ(manual, sums, state.step), mark)
        question = jnp.concatenate([*(lax.bitcast_convert_type(each, u32)[None] for each in numbers), state.run])
        expected = jax.ShapeDtypeStruct((3 + self._words.size,), u32)

        def ask() -> Array:
            told: Array = io_callback(self._answer, expected, question, shown)
            return told

        if manual:
            first = sum(lax.axis_index(axis) for axis in manual) == 0
            told = lax.psum(lax.cond(first, ask, lambda: jnp.zeros(expected.shape, u32)), manual)
        else:
            told = ask()
        keys = told[3:].reshape(self._words.shape)
        return lax.bitcast_convert_type(told[0], i32), keys, told[1], lax.bitcast_convert_type(told[2], f32)

    def _differ(self, manual: tuple[str, ...], sums: Sequence[Array], step: Array) -> Array:
        """() 1 if devices that hold the same elements have other sums for them, or stand at other steps, else 0.

        They may wherever a program says that an array is replicated and JAX does not check it: inside a `shard_map`,
        after one with `check_vma=False`, and where an array was put together from parts, as from the checkpoints of
        several processes. A device that is behind would make the noise of a step that was released.
        """
        mesh = self._mesh or mesh_of(sums)
        if mesh is None and not manual:
            return i32(0)
        slices = self._slices if manual or self._mesh else [Slice.of(jax.typeof(total)) for total in sums]
        sums, slices = [*sums, lax.bitcast_convert_type(step, f32)], [*slices, Slice((), ())]
        if manual:
            return _differ(sums, slices, manual)
        kept = [(total, where) for total, where in zip(sums, slices, strict=True) if total.size]  # see `on_parts`
        compared = partial(_differ, slices=[where for _, where in kept], manual=tuple(mesh.axis_names))
        specs = [P() if where.spec is None else where.spec for _, where in kept]
        whole = jax.shard_map(compared, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
        differ: Array = whole([total for total, _ in kept])
        return differ

    def _answer(self, question: Any, sums: Any) -> Any:
        """Runs on the host, once per step, before anything of the step is released."""
        asked = np.asarray(question)  # as NumPy from here on: an operation of JAX could wait for the step that waits
        (step, refused, differ), run = asked[:3].view(np.int32).tolist(), asked[4:]
        code = 0
        if not refused:
            try:
                self._allow(step, run, bool(differ), [np.asarray(total) for total in sums])
            except QuellError as problem:
                REFUSALS.append(str(problem))
                code = len(REFUSALS)
        keys = np.zeros_like(self._words) if code or refused else self._words
        return np.concatenate([np.array([code, 0, self._expected.view(np.uint32)], np.uint32), keys.ravel()])

    def close(self) -> None:
        """Let go of the ledger and the log, and release no more steps.

        JAX runs updates later than they are called for: those are finished first, which would be refused afterwards.
        """
        jax.effects_barrier()
        self._closed = True
        if self.guard.ledger is not None:
            self.guard.ledger.close()
        if self.watch is not None:
            self.watch.close()

    def _allow(self, step: int, run: Any, differ: bool, sums: list[Any]) -> None:
        if os.getpid() != self._process:
            raise QuellError("a run does not survive a fork: parent and child would release the same steps")
        if self._closed:
            raise QuellError("close() was called, and no more steps are released: call privatize again to go on")
        if not counts_steps():
            raise QuellError("process 0 counts the steps, but another one was asked: put its device first in the mesh")
        if differ:
            raise QuellError(
                "devices that hold the same parameters have different sums, and the same noise would hide neither: add "
                "the sums up over data-parallel axes (lax.psum) before update. Or they have states of different steps: "
                "restore the same checkpoint in every process"
            )
        if not np.array_equal(run, self.name):
            raise QuellError(
                "the state belongs to another key, plan, max_grad_norm, generator or set of parameters: resume with "
                "exactly those it was saved under"
            )
        if step >= self.spec.steps:
            raise QuellError(f"the plan ends after {self.spec.steps:,} steps: stop here, or make a new plan and key")
        if step < self._due:
            raise QuellError(
                f"step {step:,} was released before, and each step's noise is used once: go on with the state that "
                "update returned. Copies of a state, vmap over update, and optax wrappers that return to an older "
                "state, such as MultiSteps, cannot be used. To go back to an older checkpoint of a run with a ledger, "
                "call close() and then privatize again"
            )
        if self._due < 0:
            self.guard.check_resuming(step, step, replay=True)
        if self.watch is not None:
            self.watch.begin(step, max(step, self.guard.released))
        witness = None if self._witness is None else self._witness(sums)
        self.guard.before(step, step + 1, witness)
        self._due = step + 1


def _unsharded(total: Array, where: Slice) -> Array:
    for dimension, axes in enumerate(where.axes):
        if axes:
            total = lax.all_gather(total, axes, axis=dimension, tiled=True)
    return total


def _differ(sums: Sequence[Array], slices: Sequence[Slice], manual: tuple[str, ...]) -> Array:
    """() 1 if devices have other sums for the same elements, by digests of them, over these axes; else 0."""
    digests: dict[tuple[str, ...], list[Array]] = {}  # by the axes that they are compared over
    for total, where in zip(sums, slices, strict=True):
        held = {axis for axes in where.axes for axis in axes}
        if others := tuple(axis for axis in manual if axis not in held):
            digests.setdefault(others, []).append(_mixed(total))
    differ = i32(0)
    for others, found in digests.items():
        each = jnp.stack(found)
        differ = jnp.maximum(differ, jnp.any(lax.pmax(each, others) != lax.pmin(each, others)).astype(i32))
    return lax.pmax(differ, manual) if manual else differ


def _mixed(total: Array) -> Array:
    """() a number of 32 bits that depends on every element and its place, by the finaliser of MurmurHash3."""
    bits = lax.bitcast_convert_type(total.astype(f32), u32).reshape(-1)
    mixed = bits + jnp.arange(bits.size, dtype=u32) * u32(0x9E3779B9)
    mixed = (mixed ^ mixed >> 16) * u32(0x85EBCA6B)
    mixed = (mixed ^ mixed >> 13) * u32(0xC2B2AE35)
    return (mixed ^ mixed >> 16).sum(dtype=u32)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
