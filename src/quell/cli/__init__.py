"""The command `quell`: one file per command, which parses its options, makes one call, and shows the result.

Bad input is answered with one sentence on standard error and exit status 2; a plan that fails verification with
status 1, and so is one that an audit breaks.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from quell import __version__
from quell.cli import audit, bench, budget, compare, mechanisms, plan, price, serve, terminal, train, tune, verify
from quell.errors import QuellError

HELP = """
Train models with differential privacy under [bold]correlated noise[/bold].

Each step's noise partly cancels that of earlier steps. Far less of it stays in the model, at the same privacy.

[bold]Examples[/bold]

  quell plan --examples 50000 --batch-size 128 --epochs 10 \\
      --epsilon 8 --delta 1e-5
  quell plan ... --save plan.json --html plan.html
  quell verify plan.json
  quell price bisr --bands 64 --steps 3900 --epochs 10 \\
      --epsilon 8 --delta 1e-5
  quell compare bisr --bands 2,4,8 --steps 3900 --epochs 10 \\
      --epsilon 8 --delta 1e-5

Exit status: 0 success, 1 a plan fails verification or an audit, 2 invalid request, 130 interrupted by Ctrl-C.
"""

_INTERRUPTED = 130  # the exit status of programs that Ctrl-C ended

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    plan.plan,
    serve.serve,
    bench.bench,
    price.price,
    compare.compare,
    verify.verify,
    audit.audit,
    train.train,
    tune.tune,
    mechanisms.mechanisms,
):
    app.command()(command)
app.add_typer(budget.app)


def _version(wanted: bool) -> None:
    if wanted:
        terminal.say(f"quell {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    terminal.set_width()


def main() -> None:
    """Entry point: turns errors a person can fix into one sentence."""
    try:
        app()
    except QuellError as problem:
        terminal.errors.print(Text.assemble(("quell: ", "bold red"), str(problem)), soft_wrap=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # Typer turns Ctrl-C into this, in silence
            terminal.errors.print("quell: interrupted")
        raise
