"""What --help shows beside options: a command's text, lines to paste, and nothing that needs more than 80 columns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_RUN = "--examples 50k --batch-size 500 --epochs 10 --epsilon 8"
EXAMPLES = {
    "plan": [f"quell plan {_RUN}", f"quell plan {_RUN} \\\n    --save plan.json --html plan.html"],
    "price": [f"quell price 'blt d=2 h=88' \\\n    {_RUN} \\\n    --save plan.json"],
    "compare": [f"quell compare blt --buffers 1,2,4 \\\n    {_RUN}"],
    "diff": ["quell diff plan.json other.json"],
    "verify": ["quell verify plan.json"],
    "audit": ["quell audit plan.json"],
    "serve": ["quell serve --examples 50k --batch-size 500"],
    "train": [
        "quell train my.csv --target outcome --classes no,yes \\\n    --range age=0:120",
        "quell train data.npz --classes 10",
    ],
    "predict": ["quell predict my-private new.csv --out predictions.csv"],
    "tune": ["quell tune --examples 50k --batch-size 256,512 \\\n    --epochs 10 --epsilon 8"],
    "watch": ["quell watch runs/1", "quell watch runs/1 --html watch.html"],
    "bench": ["quell bench --parameters 10M"],
    "mechanisms": ["quell mechanisms"],
    "budget init": ["quell budget init patients.budget \\\n    --name patients --epsilon 8 --delta 1e-6"],
    "budget add": ["quell budget add patients.budget plan.json"],
    "budget show": ["quell budget show patients.budget"],
    "budget verify": ["quell budget verify patients.budget"],
}


def add(app: typer.Typer, command: Callable[..., Any], under: str = "") -> None:
    """Make a function a command of the app, with its docstring and examples as its help."""
    name = f"{under} {command.__name__}".strip()
    app.command(cls=Command, help=_described(name, command.__doc__ or ""))(command)


def example_of(command: str) -> str:
    """The first example of a command, indented, to be pasted."""
    return _indented(EXAMPLES[command][:1])


def _described(name: str, text: str) -> str:
    """A docstring as --help shows it: paragraphs of one line each, so that they wrap anywhere, and the examples."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]
    shown = [f"[bold]Examples[/bold]\n\n{_indented(EXAMPLES[name])}"] if name in EXAMPLES else []
    return "\n\n".join([*paragraphs, *shown])


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for text in lines for line in text.split("\n"))


class Command(TyperCommand):
    """A command whose flags are listed without the name of a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The same for a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters
