"""Two processes train together: the noise is that of one, process 0 counts, and where one fails, both do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from quell.jax import clipped_grad
from quell.noise import NoiseSpec, NoiseStream

from .one_of_two import CLIP, SHAPES, data, loss, small_plan
from .trees import seeded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes found."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
    folder = tmp_path_factory.mktemp("processes")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.in_jax.one_of_two", str(number), port, str(folder)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        )
        for number in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(folder.joinpath(f"{number}.json").read_text()) for number in range(2)]


def test_the_noise_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    plan = small_plan()
    spec = NoiseSpec.of(plan.mechanism, CLIP)
    stream = NoiseStream(spec, [shape for shape, _ in SHAPES.values()], key=seeded(9), generator="philox")
    params = {name: np.full(shape, 0.01, np.float32) for name, (shape, _) in SHAPES.items()}
    sums = jax.jit(clipped_grad(loss, CLIP))
    (x, y), first = data(), found[0]
    assert first["key"] == seeded(9).id
    for key in ("rows", "indices", "key"):
        assert first[key] == found[1][key]
    assert len(first["rows"]) == plan.steps
    for indices, (summed, updates) in zip(first["indices"], first["rows"], strict=True):
        expected = sums(params, (x[indices], y[indices]), None)
        released = []
        for name, (shape, _) in SHAPES.items():
            np.testing.assert_allclose(summed[name], np.ravel(expected[name]), rtol=1e-4, atol=1e-5)
            released.append(np.array(summed[name], np.float32).reshape(shape))
        stream.add_(released)
        for name, total in zip(SHAPES, released, strict=True):
            np.testing.assert_array_equal(np.float32(updates[name]), -(total / np.float32(8)).ravel())


def test_what_one_process_must_not_do_alone(found: list[dict[str, Any]]) -> None:
    for here in found:
        assert "were given different plans" in here["disagreement"]
        assert "must be positive" in here["one fails"]
        assert "a mesh of all processes' devices" in here["local parameters"]
        assert here["all NaN"]
    assert "have different sums" in found[0]["sums apart"]  # each process its own, called replicated
    assert "refused in another process" in found[1]["sums apart"]
    assert found[1]["one fails"].startswith("process 0: ")
    assert found[0]["report"] == 6
    assert "ask for the report there" in found[1]["report"]
    assert "the plan ends after 6 steps" in found[0]["past the plan"]
    assert "refused in another process" in found[1]["past the plan"]
