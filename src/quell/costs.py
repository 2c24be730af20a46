"""What noise costs in time: nanoseconds per parameter and step, on a kind of device.

    base + draw·(draws − 1) + buffer·buffers

Three numbers per device, fitted to the measurements in `benchmarks/results/noise_*.md` (10⁸ float32 parameters on a
GPU, 10⁷ on a CPU, ChaCha20): `base` is adding independent noise to a gradient, `draw` making one more noise vector anew
from its counters, `buffer` reading and writing one more model-sized vector, as a `blt` does (a ring of buffers writes
only one of them and takes half). Those of ChaCha8 (`h200-chacha8`, `cpu-chacha8`) are derived and not measured, by the
rule in `quell.noise.buffering`. `quell bench` measures ChaCha20 on this machine and keeps the numbers in the cache
folder, where `device("measured")` finds them.

A limit on noise time is a share of the time of a training step. It is turned into nanoseconds per parameter when a plan
is made and stored with the plan, so that a plan file means the same on every machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from quell import cache, files
from quell.errors import QuellError, require_count, require_finite, short

_FILE, _MOST_BYTES = "noise_cost.json", 10_000


class Noise(Protocol):
    """Anything with `buffers` (vectors kept between steps) and `draws` (vectors made per step)."""

    @property
    def buffers(self) -> int: ...

    @property
    def draws(self) -> int: ...


@dataclass(frozen=True)
class NoiseCost:
    """Nanoseconds per parameter and step."""

    base: float
    draw: float
    buffer: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if require_finite(name, value) <= 0:
                raise QuellError(f"noise cost {name}={value:g} must be a positive number of nanoseconds")

    def of(self, buffers: int, draws: int) -> float:
        """Nanoseconds per parameter and step with this many buffers and draws.

        >>> DEVICES["h200"].of(buffers=0, draws=2) < DEVICES["cpu"].of(buffers=0, draws=2)
        True
        """
        return self.base + self.draw * (draws - 1) + self.buffer * buffers


@dataclass(frozen=True)
class TimeLimit:
    """Noise may take `most` nanoseconds per parameter and step, at these costs."""

    cost: NoiseCost
    most: float

    def __post_init__(self) -> None:
        if not isinstance(self.cost, NoiseCost):
            raise QuellError(f"cost={short(self.cost)} must be a NoiseCost, what noise takes on a kind of device")
        if require_finite("most", self.most) <= 0:
            raise QuellError(f"a time limit of most={self.most:g} must be a positive number of nanoseconds")

    @classmethod
    def of_plain(cls, content: object) -> TimeLimit:
        """The limit that `dataclasses.asdict` turned into plain data for a plan file."""
        match content:
            case {"cost": {"base": base, "draw": draw, "buffer": buffer, **beyond}, "most": most, **more} if not (
                beyond or more
            ):
                return cls(NoiseCost(base, draw, buffer), most)
        raise QuellError(f"time_limit={short(content)} is not a limit: make one with quell.costs.TimeLimit.of_share")

    @classmethod
    def of_share(cls, share: float, step_seconds: float, parameters: int, device_name: str) -> TimeLimit:
        """The limit that noise takes at most this share of a training step.

        >>> TimeLimit.of_share(0.01, step_seconds=0.25, parameters=100_000_000, device_name="h200").allows(0, 2)
        True
        """
        if not 0 < require_finite("noise_share", share) <= 1:
            raise QuellError(f"noise_share={share:g} must lie between 0 and 1: 0.03 allows noise 3% of a step's time")
        if require_finite("step_seconds", step_seconds) <= 0:
            raise QuellError(f"step_seconds={step_seconds:g} must be positive: how long one training step takes")
        return cls(device(device_name), share * step_seconds * 1e9 / require_count("parameters", parameters))

    def allows(self, buffers: int, draws: int) -> bool:
        return self.cost.of(buffers, draws) <= self.most


DEVICES = {
    "h200": NoiseCost(base=0.0040, draw=0.0036, buffer=0.0015),  # noise_gpu.md: 0.404 ms, p=16 5.804, BLT d=4 1.013
    "h200-chacha8": NoiseCost(base=0.0029, draw=0.0023, buffer=0.0015),
    "cpu": NoiseCost(base=1.4, draw=0.7, buffer=0.15),  # noise_cpu.md, two cores: 15.9 ms, p=16 117.9, BLT d=4 19.8
    "cpu-chacha8": NoiseCost(base=1.1, draw=0.43, buffer=0.15),
}


def device(name: str) -> NoiseCost:
    """The costs of a kind of device, or those that `quell bench` measured here ("measured")."""
    if name in DEVICES:
        return DEVICES[name]
    if name != "measured":
        raise QuellError(f"there are no noise costs for the device {name!r}: use {', '.join(DEVICES)}, or measured")
    path = measured_file()
    try:
        return NoiseCost(**json.loads(files.read(path, _MOST_BYTES))["cost"])
    except OSError:
        raise QuellError("noise has not been measured on this machine: run quell bench first") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise QuellError(f"{path} is damaged: run quell bench again") from None


def keep(cost: NoiseCost, about: str) -> Path:
    """Store measured costs for `device("measured")`."""
    path = measured_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"cost": asdict(cost), "about": about}, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise QuellError(f"cannot write the measured costs to {path}: {problem.strerror}") from problem
    return path


def measured_file() -> Path:
    home = cache.folder()
    if home is None:
        raise QuellError("measured costs live in the cache folder, which QUELL_CACHE=off turns off: set another one")
    return home / _FILE


@dataclass(frozen=True)
class Limits:
    """What noise may cost.

    Args:
        memory: Most model-sized vectors kept between steps; None for no limit.
        draws: Most noise vectors generated per step.
        time_limit: How long noise may take (`quell.costs.TimeLimit.of_share`); None for no limit.
    """

    memory: float | None = 4.0
    draws: int = 16
    time_limit: TimeLimit | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", require_count("draws", self.draws))
        if self.memory is not None:
            object.__setattr__(self, "memory", require_finite("memory", self.memory))
            if self.memory < 0:
                raise QuellError(
                    f"memory={self.memory:g} model copies must not be negative: 0 allows only mechanisms without "
                    "buffers"
                )
        if self.time_limit is not None and not isinstance(self.time_limit, TimeLimit):
            raise QuellError(
                f"time_limit={short(self.time_limit)} is not a limit: make one with quell.costs.TimeLimit.of_share"
            )

    @property
    def buffers(self) -> float:
        """The limit on memory as a number."""
        return math.inf if self.memory is None else self.memory

    def fits(self, noise: Noise) -> bool:
        """Whether noise stays within all limits."""
        in_time = self.time_limit is None or self.time_limit.allows(noise.buffers, noise.draws)
        return noise.buffers <= self.buffers and noise.draws <= self.draws and in_time
