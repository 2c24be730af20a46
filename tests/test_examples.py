"""Every example runs, in its small version, and stays short enough to copy."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ALONE = ("digits.py", "fsdp.py", "patients.py")  # with a test of their own
SLOW = ("cifar10.py", "vit.py", "bert_lora.py", "gpt.py", "lightning_module.py")
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ALONE)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path):
    assert len(path.read_text().splitlines()) < 80
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in NAMES])
@pytest.mark.filterwarnings("default")
def test_an_example_runs_to_the_end_of_its_plan(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    result = main(small=True) if "small" in main.__annotations__ else main()
    assert result > 0.2 if name == "cifar10.py" else result == 1.0


@pytest.mark.slow
def test_the_sharded_example_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(EXAMPLES / "fsdp.py"), "--small", "--folder", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *script], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "(8, 10⁻⁶)-DP after 10 steps" in done.stdout
