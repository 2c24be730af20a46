"""One of two processes with two CPU devices each, which train together: started by test_processes.py."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell import QuellError
from quell.jax import batches, check, clipped_grad, privatize
from quell.noise import Key
from quell.planning import Plan, Prices
from quell.run import Run

SHAPES = {"b": ((13,), P()), "v": ((8, 12), P("x", "y")), "w": ((6, 64), P(None, "y"))}
CLIP, EXAMPLES = 0.5, 24


def small_plan() -> Plan:
    run = Run.from_data(examples=EXAMPLES, batch_size=8, epochs=2, epsilon=8.0, delta=1e-3, sampling="cyclic")
    return Plan(run, (Prices(run).price("bsr", bands=2),), 0)


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(4)
    return random.standard_normal((EXAMPLES, 8)).astype(np.float32), random.standard_normal(EXAMPLES).astype(np.float32)


def loss(params: Any, x: Any, y: Any) -> Any:
    return ((x @ params["v"]).sum() + params["w"].sum() + params["b"] @ params["b"] - y) ** 2


def refused(work: Any) -> str:
    try:
        work()
    except QuellError as problem:
        return str(problem)
    return "nothing was refused"


def main(number: int, port: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def spread(whole: Any, spec: Any) -> Any:
        return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda part: whole[part])

    params = {name: spread(np.full(shape, 0.01, np.float32), spec) for name, (shape, spec) in SHAPES.items()}
    found: dict[str, Any] = {}

    def other_key() -> Any:
        return privatize(small_plan(), params, CLIP + number, key=Key.generate())

    found["disagreement"] = refused(other_key)
    found["one fails"] = refused(lambda: privatize(small_plan(), params, CLIP if number else -1.0))
    found["local parameters"] = refused(lambda: privatize(small_plan(), jax.numpy.zeros(3), CLIP))

    plan = small_plan()
    own = Key.from_seed(9 + number)  # process 0's counts
    private = privatize(plan, params, CLIP, key=own, generator="philox")
    optimizer = optax.chain(private, optax.scale(-1.0))
    clipped = clipped_grad(loss, private, micro_batch=3)
    everyone = ("x", "y")
    shared = jax.shard_map(
        lambda params, batch, mask: lax.psum(clipped(params, batch, mask), everyone),
        mesh=mesh,
        in_specs=(P(), P(everyone), P(everyone)),
        out_specs=P(),
    )

    @jax.jit
    def step(params: Any, state: Any, batch: Any, mask: Any) -> Any:
        sums = shared(params, batch, mask)
        updates, state = optimizer.update(sums, state, params)
        return sums, updates, state

    gathered = jax.jit(lambda *trees: trees, out_shardings=NamedSharding(mesh, P()))
    x, y = data()
    state, rows = optimizer.init(params), []
    apart = {name: spread(np.full(shape, number, np.float32), spec) for name, (shape, spec) in SHAPES.items()}
    found["sums apart"] = refused(lambda: check(jax.jit(optimizer.update)(apart, state, params)[1]))
    drawn = []
    for indices, mask in batches(private, EXAMPLES, devices=4):
        drawn.append(indices.tolist())
        parts = [spread(each, P(everyone)) for each in (x[indices], y[indices], mask)]
        sums, updates, state = step(params, state, (parts[0], parts[1]), parts[2])
        whole = gathered(sums, updates)
        rows.append([{name: np.asarray(leaf).ravel().tolist() for name, leaf in tree.items()} for tree in whole])
    check(state)
    found["rows"], found["key"], found["indices"] = rows, private.key.id, drawn
    found["report"] = private.report(state).steps_done if number == 0 else refused(lambda: private.report(state))
    _, updates, state = step(params, state, (parts[0], parts[1]), parts[2])
    found["past the plan"] = refused(lambda: check(state))
    found["all NaN"] = all(bool(np.isnan(np.asarray(shard.data)).all()) for shard in updates["v"].addressable_shards)
    folder.joinpath(f"{number}.json").write_text(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
