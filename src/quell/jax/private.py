"""`privatize`: the plan's noise as an optax transformation of clipped gradient sums.

What is traced and what stays on the host. The state is a pytree of the step, the buffers of those recurrences that have
any, and the name of the run; never the key. A step asks the host for the key by a callback, and the host answers after
it has noted the step: in the ledger, on the disk, if there is one. So the key is in no compiled program, and a step
whose noise may not be used gets no key: its updates are NaN, as are all that follow, and `check` says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell.adapters.choice import described, refuse_user_level, require_clip_norm, select
from quell.adapters.report import PrivacyReport, privacy_report
from quell.adapters.scheme import scheme_of
from quell.adapters.secrets import opened
from quell.errors import QuellError, require_finite
from quell.jax.devices import platform_of, refuse_devices
from quell.jax.normals import Source
from quell.jax.rows import Row, add_row
from quell.jax.slices import Slice
from quell.jax.watch import Watch
from quell.noise import Key, Ledger, NoiseSpec
from quell.noise.fingerprint import Fingerprint
from quell.noise.generators import key_words
from quell.noise.guard import ReleaseGuard
from quell.noise.layout import require_generator, whole
from quell.noise.secrecy import never_copied
from quell.noise.stream import UNRECORDED, UnrecordedKeyWarning
from quell.schemes import Batches
from quell.watching.log import Log

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


class NoiseState(NamedTuple):
    """Where a run's noise stands. Save it with the rest of the optimizer's state; the key is not in it."""

    step: Array  # the step that is due, counted from 0
    refused: Array  # 0, or a number that `check` turns into words
    run: Array  # (4,) names key, plan, clip norm, generator and parameters
    buffers: tuple[Array, ...]  # (count, *shape) for each parameter; count may be 0


class Private(optax.GradientTransformation):
    """What `privatize` returns: `init` and `update`, as optax has them, with the key, the report and `close`."""

    host: Host

    @classmethod
    def _of(cls, host: Host) -> Private:
        made = cls(host.init, host.update)
        made.host = host
        return made

    @property
    def key(self) -> Key:
        """The run's key, which also draws its batches."""
        return self.host.key

    def report(self, state: Any) -> PrivacyReport:
        """What this run promises, has spent so far, and rests on. `state` is the optimizer's whole state."""
        check(state)
        if self.host.batches is None:
            raise QuellError("a report is about a plan's batches: call privatize with a Plan, not with a mechanism")
        step = int(_states(state)[0].step)
        released = max(step, self.host.guard.released)
        norm = self.host.max_grad_norm
        framework = ("jax", str(jax.__version__))
        return privacy_report(self.host.mechanism, self.host.batches, self.key, norm, step, released, framework)

    def close(self) -> None:
        """Let go of the ledger and the log; no more steps are released."""
        if self.host.guard.ledger is not None:
            self.host.guard.ledger.close()
        if self.host.watch is not None:
            self.host.watch.close()

    __reduce_ex__ = never_copied("a private transformation holds a key and is never pickled or copied: save its state")


def privatize(
    plan: Plan | Mechanism | NoiseSpec,
    params: Any,
    max_grad_norm: float | None = None,
    *,
    mechanism: str | Mechanism | None = None,
    expected_batch_size: float | None = None,
    key: Key | str | Path | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    generator: str = "chacha20",
    log: Log | str | Path | None = None,
) -> Private:
    """An optax transformation from clipped gradient *sums* to noisy means. Chain it before any optimizer.

    Args:
        plan: The plan. A mechanism or a `NoiseSpec` of your own needs `expected_batch_size` and has no report.
        params: The parameters, or their shapes and shardings: a pytree whose order never changes. Sharded ones need a
            `NamedSharding`; each device then makes the noise of its own slices.
        max_grad_norm: What every example's gradient was clipped to.
        mechanism: Another certified mechanism of the plan than the recommended one, by name or as an object.
        expected_batch_size: What sums are divided by, if `plan` is not a plan.
        key: The secret key, or a path: the file is made, or read if it exists, with a ledger beside it. Default: a new
            key that is not kept.
        seed: Makes the noise repeatable and voids the promise: for tests.
        ledger: The path of a ledger, which records released steps with a digest of what was released. A run that
            crashed can then repeat steps; the sums of every step are copied to the host for it.
        generator: "chacha20", "chacha8" (faster, smaller security margin) or "philox" (not secure).
        log: A folder, or a `quell.Log`, to log the run to, for `quell watch` (docs/watching.md). Not inside shard_map.

    Returns:
        The transformation, with `key`, `report(state)` and `close()`.

    >>> import quell, jax.numpy as jnp, optax
    >>> plan = quell.plan(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5, sampling="cyclic")
    >>> params = {"w": jnp.zeros((30, 10))}
    >>> private = privatize(plan, params, max_grad_norm=1.0)
    >>> optimizer = optax.chain(private, optax.sgd(0.1))
    >>> state = optimizer.init(params)
    >>> sums = {"w": jnp.zeros((30, 10))}  # of clipped gradients: see clipped_grad
    >>> updates, state = optimizer.update(sums, state, params)
    >>> private.report(state).steps_done
    1
    """
    refuse_user_level(plan)
    require_generator(generator)
    chosen = select(plan, mechanism)
    planned: Any = plan if hasattr(plan, "mechanisms") else None
    norm = max_grad_norm if max_grad_norm is None else require_clip_norm(max_grad_norm)
    if (planned is None) == (expected_batch_size is None):
        raise QuellError("expected_batch_size is the plan's own: give it if, and only if, you pass no plan")
    if planned is not None and planned.run.examples is None:
        raise QuellError("the plan does not know its data: plan with examples= and batch_size=, or pass plan.mechanism")
    scheme = None if planned is None else scheme_of(planned, chosen)
    refuse_devices(params, ledger=ledger is not None or isinstance(key, (str, Path)))
    secret, path = opened(key, seed, ledger)
    batches = None if scheme is None else Batches(scheme, planned.run.examples, secret.derive("quell batches"))
    expected = batches.expected_size if batches is not None else expected_batch_size or 0.0
    spec = NoiseSpec.of(chosen, norm)
    watch = None if log is None else Watch(log, chosen, batches, secret, float(norm or 0.0), params)
    host = Host(spec, params, secret, generator, require_finite("expected_batch_size", expected), path)
    host.mechanism, host.batches, host.max_grad_norm = chosen, batches, float(norm or 0.0)
    host.watch = watch
    return Private._of(host)


def check(state: Any) -> None:
    """Raise `QuellError` if a step of this run was refused, which has made its updates NaN. Waits for the device.

    Args:
        state: The optimizer's state, or any pytree with it inside.
    """
    for found in _states(state):
        code = int(found.refused)
        if code:
            known = 0 < code <= len(_REFUSALS)
            raise QuellError(_REFUSALS[code - 1] if known else "a step was refused in another process: see its errors")


class Host:
    """What a run keeps on the host, and the transformation that asks it."""

    def __init__(
        self, spec: NoiseSpec, params: Any, key: Key, generator: str, expected: float, ledger: Path | None
    ) -> None:
        named, self._tree = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in named]
        if not leaves:
            raise QuellError("params has no arrays: pass the parameters that are trained")
        if expected <= 0:
            raise QuellError(f"expected_batch_size={expected:g} must be positive")
        self._slices = tuple(Slice.of(leaf) for leaf in leaves)
        meshes = {where.mesh for where in self._slices if where.mesh is not None}
        if len(meshes) > 1:
            raise QuellError("the parameters lie on different meshes: shard them all over one")
        self._mesh = next(iter(meshes), None)
        names = tuple(jax.tree_util.keystr(path) for path, _ in named)
        spec = replace(spec, promise=f"{spec.promise} {described(names, leaves)}")
        self.spec, self.key, self.generator = spec, key, generator
        self._recipe, self._expected = spec.recipe(), np.float32(expected)
        self._platform = platform_of(leaves)
        self._name = np.frombuffer(
            blake2b(f"{key.id} {spec.made_by(generator)}".encode(), digest_size=16).digest(), "<u4"
        )
        shards = whole(leaves)
        if ledger is None and key.loaded and not key.seeded:
            warnings.warn(UNRECORDED, UnrecordedKeyWarning, stacklevel=3)
        kept = None if ledger is None else Ledger(ledger)
        try:
            self.guard = ReleaseGuard(key, spec.made_by(generator), shards, kept, replay=True)
        except QuellError:
            if kept is not None:
                kept.close()
            raise
        self._witness = None if kept is None else Fingerprint(key, shards, None)
        self._words = np.stack([key_words(generator, key, number) for number in range(len(leaves))])
        self._begun = False
        self._compiled = jax.jit(partial(self._update, ()))  # callbacks and shard_map want a traced program
        self.mechanism: Any = None
        self.batches: Batches | None = None
        self.max_grad_norm = 0.0
        self.watch: Watch | None = None

    __reduce_ex__ = never_copied("a run holds a key and is never pickled or copied: save its state")

    def init(self, params: Any) -> NoiseState:
        self._leaves(params, [where.shape for where in self._slices])
        buffers = []
        for where in self._slices:
            sharding = None if where.mesh is None else NamedSharding(where.mesh, P(None, *where.spec))
            buffers.append(jnp.zeros((self._recipe.buffers, *where.shape), jnp.float32, device=sharding))
        return NoiseState(jnp.int32(0), jnp.int32(0), jnp.asarray(self._name), tuple(buffers))

    def update(self, updates: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        manual = tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
        if manual:
            return self._update(manual, updates, state)
        means, after = self._compiled(updates, state)
        return means, after

    def _update(self, manual: tuple[str, ...], updates: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        needed = {axis for where in self._slices for axes in where.axes for axis in axes}
        if manual and not needed <= set(manual):
            raise QuellError(f"inside shard_map, all axes that parameters are sharded over must be manual: {needed}")
        shapes = [where.local if manual else where.shape for where in self._slices]
        sums = self._leaves(updates, shapes)
        code, keys, zero, expected = self._ask(manual, state, sums)
        refused = jnp.where(state.refused != 0, state.refused, code)

        def step(step: Array, keys: Array, zero: Array, sums: Any, buffers: Any) -> Any:
            source = Source(self.generator, keys, zero)
            row = Row.of(self._recipe, step)
            return add_row(self._recipe, source, self._slices, lax.axis_index, row, sums, buffers, self._platform)

        made: Callable[..., Any] = step
        if self._mesh is not None and not manual:
            specs = [P() if where.spec is None else where.spec for where in self._slices]
            kept = [P(None, *spec) for spec in specs]
            made = jax.shard_map(
                step, mesh=self._mesh, in_specs=(P(), P(), P(), specs, kept), out_specs=(specs, kept), check_vma=False
            )
        noisy, buffers = made(state.step, keys, zero, list(sums), list(state.buffers))
        sound = refused == 0
        if self.watch is not None:
            self.watch.tell(manual, state.step, noisy, sound)
        means = [
            jnp.where(sound, released / expected, jnp.nan).astype(total.dtype)
            for released, total in zip(noisy, sums, strict=True)
        ]
        after = NoiseState(state.step + sound.astype(jnp.int32), refused, state.run, tuple(buffers))
        return jax.tree_util.tree_unflatten(self._tree, means), after

    def _leaves(self, tree: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        leaves: list[Any]
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._tree:
            raise QuellError(
                "these are not the parameters that privatize was called with: pass the same tree, in order"
            )
        for leaf, shape in zip(leaves, shapes, strict=True):
            if tuple(leaf.shape) != tuple(shape):
                raise QuellError(f"a leaf has shape {tuple(leaf.shape)}, where privatize was given {tuple(shape)}")
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise QuellError(f"a leaf has dtype {leaf.dtype}: noise is added to floating-point sums")
        return leaves

    def _ask(self, manual: tuple[str, ...], state: NoiseState, sums: Sequence[Array]) -> tuple[Array, ...]:
        """The host's answer, from one device: refusal, keys, zero and the expected batch size."""
        shown = [_gathered(total, where) if manual else total for total, where in zip(sums, self._slices, strict=True)]
        shapes = (((), jnp.int32), (self._words.shape, jnp.uint32), ((), jnp.uint32), ((), jnp.float32))
        expected = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
        # A number of the sums goes along, so that sums that are mapped over ask once each, and get noise once.
        mark = sum((jnp.ravel(total)[:1].sum().astype(jnp.float32) for total in sums), jnp.float32(0))
        given = (state.step, state.refused, state.run, mark, shown if self._witness is not None else [])

        def ask() -> tuple[Array, ...]:
            return tuple(io_callback(self._answer, expected, *given))

        if not manual:
            return ask()
        first = sum(lax.axis_index(axis) for axis in manual) == 0
        answer = lax.cond(first, ask, lambda: tuple(jnp.zeros(each.shape, each.dtype) for each in expected))
        return tuple(lax.psum(each, manual) for each in answer)

    def _answer(self, step: Any, refused: Any, run: Any, _: Any, sums: Any) -> tuple[Any, ...]:
        """Runs on the host, once per step, before anything of the step is released."""
        code = 0
        if int(refused) == 0:
            try:
                self._allow(int(step), np.asarray(run), [np.asarray(total) for total in sums])
            except QuellError as problem:
                _REFUSALS.append(str(problem))
                code = len(_REFUSALS)
        told = np.zeros_like(self._words) if code or int(refused) else self._words
        return np.int32(code), told, np.uint32(0), self._expected

    def _allow(self, step: int, run: Any, sums: list[Any]) -> None:
        if not np.array_equal(run, self._name):
            raise QuellError(
                "the state belongs to another key, plan, max_grad_norm, generator or set of parameters: resume with "
                "exactly those it was saved under"
            )
        if step >= self.spec.steps:
            raise QuellError(f"the plan ends after {self.spec.steps:,} steps: stop here, or make a new plan and key")
        if not self._begun:
            self.guard.check_resuming(step, step, replay=True)
        if self.watch is not None:
            self.watch.begin(step, max(step, self.guard.released))
        witness = None if self._witness is None else self._witness(sums)
        self.guard.before(step, step + 1, witness)
        self._begun = True


_REFUSALS: list[str] = []  # what `NoiseState.refused` counts


def _gathered(total: Array, where: Slice) -> Array:
    for dimension, axes in enumerate(where.axes):
        if axes:
            total = lax.all_gather(total, axes, axis=dimension, tiled=True)
    return total


def _states(state: Any) -> list[NoiseState]:
    leaves = jax.tree_util.tree_leaves(state, is_leaf=lambda node: isinstance(node, NoiseState))
    found = [leaf for leaf in leaves if isinstance(leaf, NoiseState)]
    if not found:
        raise QuellError("there is no state of quell.jax.privatize in this: pass the optimizer's whole state")
    return found
