"""What noise costs in time: nanoseconds per parameter and step, on a kind of device with a generator.

    base + draw·(draws − 1) + buffer·buffers

Three numbers per device, fitted to the measurements in `benchmarks/results/noise_*.md` (10⁸ float32 parameters on a
GPU, 10⁷ on a CPU): `base` is adding independent noise to a gradient, `draw` making one more noise vector anew
from its counters, `buffer` reading and writing one more model-sized vector, as a `blt` does. `quell bench` measures
ChaCha20 on this machine and keeps the numbers in the cache folder, where `device("measured")` finds them.

With p coefficients of C⁻¹ a step needs the draws of p steps. Each old draw that is kept (`KEPT`) saves making it, at
the price of a float32 vector of the model's size; the newest are kept, the others made again, the same bits.

Some costs of ChaCha8 are not measured but derived. On the H200 `base`: linear in the rounds, with Philox's costs as
what is left without any (most of it the transform to normals, which is the same); Philox's own rounds make this too
high rather than too low. On the CPU: ChaCha20's, less what 12 rounds took in a direct comparison of the two on a busy
machine, where a draw of ChaCha8 took 0.61 times as long.

A limit on noise time is a share of the time of a training step. It is turned into nanoseconds per parameter when a plan
is made and stored with the plan, so that a plan file means the same on every machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from quell import cache, files
from quell.errors import QuellError, require_count, require_finite, short

_FILE, _MOST_BYTES = "noise_cost.json", 10_000


class NoiseSize(Protocol):
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


class KeptCost(NamedTuple):
    """Nanoseconds of a step with old draws that are kept: `start` without any, `each` more for every one."""

    start: float
    each: float


DEVICES: Final = {  # ChaCha20, unless the name says otherwise
    "h200": NoiseCost(base=0.0040, draw=0.0036, buffer=0.0015),  # noise_gpu.md: 0.404 ms, p=16 5.804, BLT d=4 1.013
    "h200-chacha8": NoiseCost(base=0.0029, draw=0.0016, buffer=0.0015),  # noise_gpu.md, 10⁹ parameters: p=16 27.1 ms
    "h200-philox": NoiseCost(base=0.0021, draw=0.0014, buffer=0.0015),
    "cpu": NoiseCost(base=1.4, draw=0.7, buffer=0.15),  # noise_cpu.md, two cores: 15.9 ms, p=16 117.9, BLT d=4 19.8
    "cpu-chacha8": NoiseCost(base=1.1, draw=0.43, buffer=0.15),
    "cpu-philox": NoiseCost(base=2.1, draw=0.95, buffer=0.15),
}
KEPT: Final = {
    "h200": KeptCost(0.0030, 0.0009),
    "h200-chacha8": KeptCost(0.0030, 0.0009),
    "h200-philox": KeptCost(0.0031, 0.0009),
    "cpu": KeptCost(1.3, 0.17),
    "cpu-chacha8": KeptCost(1.0, 0.17),
    "cpu-philox": KeptCost(1.5, 0.17),
}
WORTH_IT: Final = 0.8  # memory is spent only where a step then takes at most this part of its time


def draws_to_keep(coefficients: int, kind: str, generator: str, memory: float) -> int:
    """How many of the p−1 old draws to keep in `memory` (in float32 copies of the model) on "cpu" or "cuda".

    All that fit, if that saves a fifth of a step's time; otherwise none.

    >>> [draws_to_keep(16, "cuda", "chacha20", memory) for memory in (1, 8, 100)]
    [0, 8, 15]
    """
    name = name_of(kind, generator)
    remade, kept = DEVICES[name], KEPT[name]
    most = int(min(coefficients - 1, memory))
    time = kept.start + kept.each * most + remade.draw * (coefficients - 1 - most)
    return most if time <= WORTH_IT * remade.of(0, coefficients) else 0


def name_of(kind: str, generator: str) -> str:
    """The name in `DEVICES` of a kind of device, as PyTorch calls it, with a generator.

    >>> name_of("cuda", "chacha20"), name_of("cpu", "philox")
    ('h200', 'cpu-philox')
    """
    place = "h200" if kind == "cuda" else "cpu"
    return place if generator == "chacha20" else f"{place}-{generator}"


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


USUAL: Final = "usual"
_COPIES, _BYTES = 4.0, 1e9  # of memory for noise, whichever is more: copies of the model, or bytes if its size is known


def copies_in(memory: float | str | None, parameters: int | None = None) -> float | None:
    """How many float32 copies of a model with so many parameters are meant; None for no limit.

    Args:
        memory: A number of copies, as a number or as text; a size such as "8GB"; "unlimited" or None; or "usual": four
            copies, or as many as take 1 GB.
        parameters: How many the model has; not needed for a number of copies.

    >>> copies_in("usual"), copies_in("usual", 1_000_000), copies_in("8GB", 10**9), copies_in("unlimited")
    (4.0, 250.0, 2.0, None)
    """
    if parameters is not None:
        parameters = require_count("parameters", parameters)
    if memory is None or memory == "unlimited":
        return None
    if memory == USUAL:
        return _COPIES if parameters is None else max(_COPIES, float(_BYTES // (4 * parameters)))
    if not isinstance(memory, str):
        return require_finite("memory", memory)
    try:
        if not memory.upper().endswith("GB"):
            return float(memory)
        size = float(memory[:-2])
    except ValueError:
        raise QuellError(
            f"memory={memory!r} must be a number of model copies, a size such as 8GB, or 'unlimited'"
        ) from None
    if parameters is None:
        raise QuellError(f"memory={memory!r} needs parameters, the size of the model, as well")
    return size * 1e9 / (4 * parameters)


@dataclass(frozen=True)
class Limits:
    """What noise may cost.

    Args:
        memory: Most model-sized vectors kept between steps; None for no limit.
        draws: Most noise vectors generated per step.
        time_limit: How long noise may take (`quell.costs.TimeLimit.of_share`); None for no limit.
    """

    memory: float | None = _COPIES
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

    def fits(self, noise: NoiseSize) -> bool:
        """Whether noise stays within all limits."""
        in_time = self.time_limit is None or self.time_limit.allows(noise.buffers, noise.draws)
        return noise.buffers <= self.buffers and noise.draws <= self.draws and in_time
