"""Where a run cannot be, as its steps would hang or go uncounted; and meshes on which JAX has every sharding named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quell.errors import QuellError


def refuse_devices(params: Any, ledger: bool) -> None:
    """Refuse parameters that not all processes hold together, and a ledger with several CPU devices."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree_util.tree_leaves(params)]
    if jax.process_count() > 1 and not all(_of_all_processes(sharding) for sharding in shardings):
        raise QuellError(
            "with several processes every parameter needs a NamedSharding over a mesh of all processes' devices, of "
            "which the first is process 0's: jax.device_put(params, NamedSharding(jax.make_mesh(...), P()))"
        )
    devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
    if ledger and all(device.platform == "cpu" for device in devices):
        refuse_recorded_cpus(len(devices))


def refuse_recorded_cpus(devices: int) -> None:
    """Refuse a ledger where a step runs on several CPU devices.

    A ledger reads the sums of every step in a callback. The copy that the callback is given needs a thread, and on
    several CPU devices all threads may be waiting for the callback's answer.
    """
    if devices > 1:
        raise QuellError(
            "a ledger cannot be kept while parameters or sums lie on several CPU devices: pass key=Key.generate() and "
            "no ledger, or use one CPU device"
        )


def refuse_shard_map(manual: Sequence[str], sharded: set[str]) -> None:
    """Refuse `update` inside a `shard_map` over some axes only, and one that checks how sharded parameters vary.

    JAX has callbacks only where all axes are manual. And all slices' noise is made in one loop, so JAX would take the
    noise of replicated parameters to vary as that of sharded ones does.
    """
    others = (sharded | set(jax.sharding.get_abstract_mesh().axis_names)) - set(manual)
    if others:
        raise QuellError(
            f"update inside shard_map needs all axes of the mesh manual, and {', '.join(sorted(others))} is not: leave "
            "axis_names out of shard_map, or call update outside of it"
        )
    if sharded and jax.typeof(lax.axis_index(manual[0])) != jax.typeof(jnp.int32(0)):
        raise QuellError(
            "update inside shard_map with sharded parameters needs check_vma=False: pass it to shard_map, or call "
            "update outside of it"
        )


def _of_all_processes(sharding: Any) -> bool:
    """Each process counts the steps of programs that it runs by itself, so a run is one program of all of them."""
    if not isinstance(sharding, NamedSharding):
        return False
    owners = [device.process_index for device in sharding.mesh.devices.flat]
    return owners[0] == 0 and set(owners) == set(range(jax.process_count()))


def platform_of(leaves: Sequence[Any]) -> str:
    """What makes the noise: "cpu", "cuda", or another name."""
    sharding = getattr(leaves[0], "sharding", None)
    device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
    return "cuda" if "cuda" in str(device.client.platform_version) else str(device.platform)


def mesh_of(arrays: Sequence[Any]) -> Any:
    """The mesh of several devices that traced arrays lie on; None if there is none."""
    meshes = (jax.typeof(each).sharding.mesh for each in arrays)
    return next((mesh for mesh in meshes if not mesh.empty and mesh.size > 1), None)


def as_xla_shards(function: Callable[..., Any], params: Any, *args: Any) -> Any:
    """`function(params, *args)`, where XLA shards what is computed inside, also on a mesh with explicit axes.

    Those, which `jax.make_mesh` makes by default, want a sharding for many operations. The result is a pair,
    of which the first is sharded as `params` are.
    """
    shardings = [jax.typeof(leaf).sharding for leaf in jax.tree_util.tree_leaves((params, args))]
    explicit = [each.mesh for each in shardings if any(axes is not None for axes in each.spec)]
    if not explicit:
        return function(params, *args)
    like = jax.tree_util.tree_map(lambda leaf: NamedSharding(explicit[0], jax.typeof(leaf).sharding.spec), params)
    return jax.sharding.auto_axes(function, out_sharding=(like, NamedSharding(explicit[0], P())))(params, *args)
