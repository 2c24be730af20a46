"""What the experiments share: result files that say where they come from, and plans read from the plan files.

A result file is one JSON object, {"about": {...}, "runs": [...]}, rewritten whole after every finished run: a killed
script loses nothing that was finished, and started again it continues where it stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quell import __version__, strategy, workload
from quell.analysis.sensitivity import Sensitivity
from quell.errors import QuellError
from quell.noise import Key, SeededKeyWarning
from quell.participation import Participation
from quell.planning import Plan, Prices
from quell.privacy import Guarantee
from quell.run import Optimizer, Promise, Run
from quell.schemes import SCHEMES, named
from quell.strategy import Strategy

HERE = Path(__file__).parent
RESULTS, PLANS = HERE / "results", HERE / "plans"
Entry = dict[str, Any]


class Results:
    """The finished runs of one experiment, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Entry] = {run["name"]: run for run in read_json(path)["runs"]} if path.exists() else {}

    def missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.runs]

    def add(self, name: str, **run: Any) -> None:
        """Keep a finished run, with the machine it was made on, and write the file."""
        self.runs[name] = {"name": name, **run, "made": machine()}
        write_json(self.path, {"runs": list(self.runs.values())})


def machine() -> Entry:
    """Versions, device and time of a run."""
    versions = {"quell": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for package in ("scipy", "torch", "triton"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"device": device_name(), "versions": versions, "time": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def device_name() -> str:
    """The GPU where PyTorch is loaded and sees one, else the processor."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    try:
        found = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        names = [line.split(":")[1].strip() for line in found.splitlines() if line.startswith("Model name")]
    except (OSError, subprocess.CalledProcessError):
        names = []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Write atomically: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def strategy_of(plan: Entry) -> Strategy:
    """The strategy of a line of a plan file, as it was built when its noise was certified."""
    n, family = plan["steps"], strategy.find(plan["mechanism"])
    own = workload.sgd(n, plan["momentum"], plan["weight_decay"], ema=plan.get("ema"))
    fitted = workload.prefix(n) if plan["fitted_to"] == "prefix" else own
    parameters = {name: plan[name] for name in family.takes if name in plan}
    solution = np.asarray(plan["solution"]) if "solution" in plan else None
    return strategy.build(family.name, fitted, Participation(n, plan["separation"]), solution, **parameters)


def plan_of(line: Entry, examples: int) -> Plan:
    """The plan that `make_private` takes, from a line of a plan file, for a data set of that size.

    The guarantee is the one that `plans.py` certified: this takes its numbers over and certifies nothing again.
    """
    run = Run(
        Participation(line["steps"], line["separation"]),
        line["epochs"],
        Promise(line["epsilon"], line["delta"]),
        Optimizer(line["momentum"], line["weight_decay"], adaptive=line.get("adaptive", False)),
        named(line["sampling"]),
        examples=examples,
        batch_size=examples // line["separation"],
    )
    if examples // (examples // line["separation"]) != line["separation"]:
        raise QuellError(f"{examples:,} examples do not make {line['separation']} batches an epoch: use more of them")
    stated = line["guarantee"]
    least = line["sensitivity"] if stated["sensitivity"] == "exact" else 0.0
    prices, chosen = Prices(run), strategy_of(line)
    guarantee = Guarantee(
        stated["epsilon"],
        stated["delta"],
        line["noise_multiplier"],
        stated["sampling"],
        Sensitivity(line["sensitivity"], least, stated["sensitivity_method"]),
        adjacency=stated["adjacency"],
        method=stated["method"],
        failure_probability=stated["failure_probability"],
        scheme=prices.scheme(chosen, SCHEMES[stated["sampling"]]),
    )
    return Plan(run, (prices.with_claim(chosen, guarantee),), 0)


def module_of(path: Path) -> Any:
    """The module in a file that is not on the path: the loader that lies beside the data."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_imdb(folder: Path) -> list[tuple[list[str], NDArray[np.int64]]]:
    """Texts and labels of the training set and of the test set, by the folder's own `load_imdb.py`."""
    parts = module_of(folder / "load_imdb.py").load_imdb(str(folder / "imdb_reviews.xz"))
    return [(list(texts), np.asarray(labels, np.int64)) for texts, labels, _ in parts]


def seeded_key(purpose: str) -> Key:
    """The same key for the same words: runs can be repeated. Data that are not public need `Key.generate()`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SeededKeyWarning)
        return Key.from_seed(int.from_bytes(blake2b(purpose.encode(), digest_size=32).digest(), "little"))
