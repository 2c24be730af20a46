"""`quell budget`."""

from __future__ import annotations

import math
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quell.budget import Budget
from quell.budget.entry import UNITS
from quell.budget.ledger import decisive
from quell.cli import options, terminal
from quell.cli.help import Group
from quell.cli.help import add as add_command
from quell.planning import Plan
from quell.show import many_runs

HELP = """
Count what all runs on one data set spend together, and refuse what exceeds it.

[bold]Examples[/bold]

  quell budget init patients.budget \\
      --name patients --epsilon 8 --delta 1e-6
  quell budget add patients.budget plan.json
  quell budget show patients.budget
  quell budget verify patients.budget

Add a run before it starts.
"""
app = typer.Typer(
    name="budget", cls=Group, help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
)

File = Annotated[Path, typer.Argument(help="A budget made by quell budget init.")]


def init(
    file: Annotated[Path, typer.Argument(help="The file to make: one per data set.")],
    name: Annotated[str | None, typer.Option(help="Name of the data set. Required.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="What all runs together may spend. Required.", **options.NUMBER)
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="At this delta: at most 1/examples. Required.", **options.NUMBER)
    ] = None,
    unit: Annotated[str, typer.Option(help=f"Whom it protects: each {', each '.join(UNITS)}.")] = "example",
    fixed_plans: Annotated[
        bool, typer.Option("--fixed-plans", help="No plan will be chosen by what earlier runs released.")
    ] = False,
) -> None:
    """Make a budget for a data set."""
    asked = options.require("budget init", {"name": name, "epsilon": epsilon, "delta": delta})
    made = Budget.create(file, **asked, unit=unit, fixed_plans=fixed_plans)
    terminal.say(many_runs.budget_title(made.allowed))
    terminal.say_written([file])


def add(
    file: File,
    plan: Annotated[Path, typer.Argument(help="The plan of the run, as quell plan --save writes it.")],
    run: Annotated[
        str | None, typer.Option(help="What names the run; the same run is charged once. Default: a new name.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Charge a run before it starts; refused where the budget does not suffice."""
    budget = Budget(file)
    with terminal.progress():
        new = budget.charge(Plan.load(plan), run=run or f"run {secrets.token_hex(4)}")
    _show(budget, None, as_json, [many_runs.charged(budget.spent(), new)])


def show(
    file: File,
    delta: Annotated[float | None, typer.Option(help="Another delta than the budget's.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what all runs so far have spent together."""
    _show(Budget(file), delta, as_json, [])


def verify(
    file: File,
    plans: Annotated[list[Path] | None, typer.Argument(help="Plan files of runs whose plans were too large.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Recompute every number in a budget from the plans in it."""
    with terminal.progress():
        checks = Budget(file).verify([Plan.load(path) for path in plans or ()])
    terminal.report(file, checks, as_json)
    if not all(check.holds for check in checks):
        raise typer.Exit(1)


for command in (init, add, show, verify):
    add_command(app, command, under="budget")


def _show(budget: Budget, delta: float | None, as_json: bool, first: list[str]) -> None:
    allowed, entries, spent = budget.allowed, budget.entries, budget.spent(delta)
    if as_json:
        runs = [{**entry.as_dict(), "plan": entry.plan is not None} for entry in entries]
        numbers = {**asdict(spent), "counted": decisive(allowed, entries)}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        terminal.print_json({"budget": asdict(allowed), "spent": known, "runs": runs})
        return
    for line in (*first, many_runs.budget_title(allowed)):
        terminal.say(line)
    if entries:
        terminal.console.print(many_runs.budget_table(entries))
    for line in many_runs.budget_spent(allowed, spent):
        terminal.say(line)
