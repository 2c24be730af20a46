"""The benchmark of `quell.jax` runs, and its ConvNet is PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax")
HERE = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    rng = np.random.default_rng(0)
    sizes = {"train": 975, "test": 10}
    pixels = {f"x_{part}": rng.integers(0, 256, (size, 32, 32, 3), np.uint8) for part, size in sizes.items()}
    labels = {f"y_{part}": rng.integers(0, 10, size, np.uint8) for part, size in sizes.items()}
    np.savez(tmp_path / "cifar10.npz", **pixels, **labels)
    command = [sys.executable, str(HERE / "jax_gpu.py"), "--tiny", "--rounds", "1", "--markdown", str(file)]
    subprocess.run([*command, "--data", str(tmp_path)], check=True, capture_output=True, timeout=900)
    text = file.read_text(encoding="utf-8")
    assert "FAILED" not in text
    assert text.count(" | 0 | 0 |\n") == 8  # no bit differs
    assert "quell.jax, micro-batch 8" in text
    assert "| 1 | " in text.split("## Training")[1]


@pytest.mark.slow
def test_the_convnet_is_the_same_in_flax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent / "experiments"))
    from flax import nnx
    from jax_convnet import flax_model
    from training import convnet

    model = convnet(1, he=False)
    graph, params = flax_model(model)
    images = np.random.default_rng(1).standard_normal((2, 32, 32, 3)).astype(np.float32)
    expected = model(torch.from_numpy(images.transpose(0, 3, 1, 2))).detach().numpy()
    np.testing.assert_allclose(nnx.merge(graph, params)(images), expected, rtol=1e-3, atol=1e-5)
