"""The command line for tests: in this process, with searches that are made once for all tests that ask for the same."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import typer

from quell import cli, planning

RUN = ["--steps", "3900", "--epochs", "10", "--epsilon", "8", "--delta", "1e-5"]
DATA = ["--examples", "2000", "--batch-size", "100", "--epochs", "4", "--epsilon", "4", "--delta", "1e-5"]
PLAN = ["plan", "--fast", *DATA, "--memory", "0", "--draws", "4"]  # limits that keep the search short
COMMAND = typer.main.get_command(cli.app)  # made once: that takes a twentieth of a second
_FOUND: dict[str, planning.Plan] = {}


def quell(*arguments: str, columns: int | None = None) -> str:
    """What a command prints; errors that a user can fix are raised."""
    width = {} if columns is None else {"COLUMNS": str(columns)}
    with redirect_stdout(io.StringIO()) as printed, patch.dict(os.environ, width):
        status = COMMAND.main(args=list(arguments), prog_name="quell", standalone_mode=False)
    assert not status
    return printed.getvalue()


def main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the program."""
    monkeypatch.setattr(sys, "argv", ["quell", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    return int(end.value.code or 0), printed.out, printed.err


def remembered(run, progress=None):
    """`make_plan`, once per run."""
    key = repr(run.arguments)
    if key not in _FOUND:
        _FOUND[key] = planning.make_plan(run, progress)
    return _FOUND[key]
