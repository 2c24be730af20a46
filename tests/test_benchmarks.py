"""The benchmark of private steps runs, and times models of the sizes it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
HERE = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(HERE))

import models  # noqa: E402


@pytest.mark.parametrize(
    ("name", "millions", "trained"),
    [
        ("decoder135", 134.6, None),
        ("vit", 85.9, None),
        ("decoder1b", 1038.8, None),
        ("lora1b", 1049.9, 11.16),
        ("convnet", 0.307, None),
        ("cnn", 0.291, None),
        ("transformer", 19.96, None),
    ],
)
def test_models_have_the_sizes_that_are_named(name: str, millions: float, trained: float | None) -> None:
    model = models.task_of(name, "meta", None, tiny=False).model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    assert learning == pytest.approx(trained or millions, rel=2e-3)


@pytest.mark.slow
def test_the_table_has_a_line_for_every_contender(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    command = [sys.executable, str(HERE / "torch_step.py"), "--tiny", "--rounds", "1", "--markdown", str(file)]
    subprocess.run([*command, "--models", "lora1b,cnn"], check=True, capture_output=True, timeout=300)
    lines = [line.split(" | ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert [line[1] for line in lines[:3]] == ["not private", "Quell", "not private"]
    assert "Quell" in {line[1] for line in lines[3:]}
    assert all(float(line[2]) > 0 and 0 < float(line[5].rstrip("%")) < 100 and float(line[6]) >= 0 for line in lines)


@pytest.mark.slow
def test_fine_tuning_is_compared_with_the_plain_trainer(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    file = tmp_path / "table.md"
    command = [sys.executable, str(HERE / "finetune.py"), "--device", "cpu", "--tiny", "--markdown", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = [
        line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith(("| Trainer", "| Private"))
    ]
    assert len(rows) == 2
