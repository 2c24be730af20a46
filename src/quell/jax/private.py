"""`privatize`: the plan's noise as an optax transformation of clipped gradient sums."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from quell.adapters.choice import require_clip_norm, select
from quell.adapters.report import PrivacyReport, privacy_report
from quell.adapters.scheme import batches_of, scheme_of
from quell.adapters.secrets import opened
from quell.adapters.users import Owned, owned_rows, require_planned_units
from quell.errors import QuellError, require_finite
from quell.jax.devices import refuse_devices
from quell.jax.given import number, require_floats
from quell.jax.host import Host
from quell.jax.processes import counts_steps, everywhere, require_agreement, shared_secret
from quell.jax.state import check, step_of
from quell.jax.watch import Watch
from quell.noise import Key, NoiseSpec
from quell.noise.layout import require_generator
from quell.noise.secrecy import never_copied
from quell.schemes import Batches
from quell.watching.log import Log

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


class Private(optax.GradientTransformationExtraArgs):
    """What `privatize` returns: `init` and `update`, as optax has them, with the key, the report and `close`."""

    host: Host
    max_grad_norm: float | None  # None for a `NoiseSpec` that has its own scale
    drawn: Batches | None  # the plan's batches; None without a plan
    users: Owned | None  # whose rows are whose; None where batches are of examples
    _mechanism: Any

    @property
    def key(self) -> Key:
        """The run's key, which also draws its batches."""
        return self.host.key

    def report(self, state: Any) -> PrivacyReport:
        """What this run promises, has spent so far, and rests on.

        Args:
            state: The optimizer's whole state, or any pytree with this run's state inside.

        Returns:
            The report: `print(report)` shows Markdown, `report.json()` gives JSON. It counts every step that this
            process or the ledger knows of, also those after the one that a checkpoint went back to.
        """
        check(state)
        if self.drawn is None:
            raise QuellError("a report is about a plan's batches: call privatize with a Plan, not with a mechanism")
        if not counts_steps():
            raise QuellError("process 0 knows what was released: ask for the report there (jax.process_index() == 0)")
        step = step_of(state, self.host.name)
        released = max(step, self.host.guard.released)
        framework = ("jax", str(jax.__version__))
        norm = float(self.max_grad_norm or 0.0)
        made_by = self.host.generator
        return privacy_report(self._mechanism, self.drawn, self.key, made_by, norm, False, step, released, framework)

    def close(self) -> None:
        """Let go of the ledger and the log; no more steps are released."""
        self.host.close()

    __reduce_ex__ = never_copied("a private transformation holds a key and is never pickled or copied: save its state")


def privatize(
    plan: Plan | Mechanism | NoiseSpec,
    params: Any,
    max_grad_norm: float | None = None,
    *,
    mechanism: str | Mechanism | None = None,
    expected_batch_size: float | None = None,
    users: Any = None,
    rows_per_user: int = 1,
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
        max_grad_norm: What every unit's gradient was clipped to: an example's, or that of a user's rows of a step.
        mechanism: Another certified mechanism of the plan than the recommended one, by name or as an object.
        expected_batch_size: What sums are divided by, if `plan` is not a plan.
        users: For a plan per user: the user of each example, as a list or an array of ids.
        rows_per_user: How many rows a user brings to a step.
        key: The secret key, or a path: the file is made, or read if it exists, with a ledger beside it. Default: a new
            key that is not kept.
        seed: Makes the noise repeatable and voids the promise: for tests.
        ledger: The path of a ledger, which records released steps with a digest of what was released. A run that
            crashed can then repeat steps; the sums of every step are copied to the host for it.
        generator: "chacha20", "chacha8" (faster, smaller security margin) or "philox" (not secure).
        log: A folder, or a `quell.Log`, to log the run to, for `quell watch` (docs/watching.md). Not inside shard_map.

    Returns:
        The transformation, with `key`, `report(state)` and `close()`. Pass it to `clipped_grad` and to `batches`, which
        take from it the clip norm, the plan's batches and whose rows are whose.

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
    planned: Any = plan if hasattr(plan, "mechanisms") else None

    def looked_at() -> tuple[Any, Any, Any, Any]:
        """Refusals first: nothing is made of the key before them."""
        require_generator(generator)
        if isinstance(plan, (str, Path)):
            raise QuellError(f"plan is a {type(plan).__name__}: load a file with quell.Plan.load(path)")
        if planned is None and not hasattr(plan, "strategy") and not isinstance(plan, NoiseSpec):
            raise QuellError(f"plan is a {type(plan).__name__}: pass a plan first, as in privatize(plan, params, 1.0)")
        require_floats(jax.tree_util.tree_leaves(params))
        if (planned is None) == (expected_batch_size is None):
            raise QuellError("expected_batch_size is the plan's own: give it if, and only if, you pass no plan")
        if planned is None and (users is not None or rows_per_user != 1):
            raise QuellError("users and rows_per_user are for a plan per user: pass a Plan, not a mechanism")
        if planned is not None and planned.run.examples is None:
            raise QuellError(
                "the plan does not know its data: plan with examples= and batch_size=, or pass plan.mechanism"
            )
        ids = np.asarray(users) if isinstance(users, jax.Array) else users
        numbers = None if planned is None else require_planned_units(planned, ids, rows_per_user)
        chosen = select(plan, mechanism)
        norm = max_grad_norm if max_grad_norm is None else require_clip_norm(number(max_grad_norm))
        scheme = None if planned is None else scheme_of(planned, chosen)
        refuse_devices(params, ledger=ledger is not None or isinstance(key, (str, Path)))
        return numbers, chosen, norm, scheme

    numbers, chosen, norm, scheme = everywhere(looked_at)
    own, path = everywhere(lambda: opened(key, seed, ledger) if counts_steps() else (None, None))
    secret, recorded = shared_secret(own, path is not None)

    def made() -> Private:
        spec, bound = NoiseSpec.of(chosen, norm), float(norm or 0.0)
        owned = None if numbers is None else owned_rows(numbers, planned, rows_per_user, secret)
        batches = None if planned is None else batches_of(planned, scheme, secret)
        watch = None if log is None else Watch(log, chosen, batches, secret, bound, params)
        expected = require_finite("expected_batch_size", batches.expected_size if batches else expected_batch_size or 0)
        whose = "" if owned is None else f" {owned.name}"
        host = Host(spec, params, secret, generator, expected, path, recorded, watch, whose)
        private = Private(host.init, host.update)
        private.host, private.max_grad_norm, private.drawn, private.users = host, norm, batches, owned
        private._mechanism = chosen
        started.append(private)
        return private

    started: list[Private] = []
    try:
        private = everywhere(made)
        watching = None if private.host.watch is None else private.host.watch.log.norms
        require_agreement(blake2b(f"{private.host.name.tolist()} {watching}".encode(), digest_size=16).digest())
    except QuellError:
        for each in started:  # another process cannot start: the key is free for the next try
            each.close()
        raise
    return private
