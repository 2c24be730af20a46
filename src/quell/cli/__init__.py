"""The command `quell`: one file per command, which parses its options, makes one call, and shows the result.

Bad input is answered with one sentence on standard error and exit status 2; a plan that fails verification with
status 1, and so is one that an audit breaks.
"""

from __future__ import annotations

import signal
import sys
import threading
from importlib import import_module
from typing import Annotated, Any, cast

import typer

from quell import __version__
from quell.cli import terminal
from quell.cli.help import Group, add
from quell.errors import QuellError

HELP = """
Train models with differential privacy under [bold]correlated noise[/bold].

Each step's noise partly cancels that of earlier steps. Far less of it stays in the model, at the same privacy.

[bold]Examples[/bold]

  quell plan --examples 50k --batch-size 500 --epochs 10 --epsilon 8
  quell plan ... --save plan.json --html plan.html
  quell plan ... --mechanism 'bisr p=16' --save other.json
  quell diff plan.json other.json
  quell verify plan.json

Exit status: 0 success, 1 a plan fails verification or an audit, 2 invalid request, 130 interrupted by Ctrl-C.
"""

_INVALID = 2
_INTERRUPTED = 130  # the exit status of programs that Ctrl-C ended
_USAGE: Any = typer.BadParameter.__mro__[1]  # UsageError, of click or of Typer's own copy of it

_STYLE: Any = {
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_HOMES = {  # every command and its file, as --help lists them
    "plan": "plan",
    "serve": "serve",
    "bench": "bench",
    "price": "price",
    "compare": "compare",
    "diff": "diff",
    "verify": "verify",
    "audit": "audit",
    "train": "train",
    "predict": "train",
    "tune": "tune",
    "watch": "watch",
    "mechanisms": "mechanisms",
    "budget": "budget",
}


class _Commands(Group):
    """All commands; each file is imported when its command is asked for, because some take a second to import."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in [cmd_name] if cmd_name in _HOMES else _HOMES:  # a misspelled one is compared with all
            if name not in self.commands:
                self.commands[name] = typer.main.get_command(_app_of(name))
        return super().get_command(ctx, cmd_name)


def _app_of(name: str) -> typer.Typer:
    home = import_module(f"quell.cli.{_HOMES[name]}")
    if hasattr(home, "app"):
        return cast(typer.Typer, home.app)
    alone = typer.Typer(add_completion=False, **_STYLE)
    add(alone, getattr(home, name))
    return alone


app = typer.Typer(cls=_Commands, help=HELP, **_STYLE)


def _version(wanted: bool) -> None:
    if wanted:
        terminal.say(f"quell {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    terminal.set_width()
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point: every error that a person can fix is one sentence, and an example where something is missing."""
    terminal.set_width()
    sys.unraisablehook = _interrupt_again
    try:
        status = app(standalone_mode=False, prog_name="quell")
    except QuellError as problem:
        status = _INVALID
        terminal.complain(str(problem))
    except _USAGE as problem:
        status = _INVALID
        if problem.format_message():  # empty where the help was shown instead
            terminal.complain(_sentence(problem))
    except (KeyboardInterrupt, typer.Abort):  # which newer versions of Typer turn into the status
        status = _INTERRUPTED
    if status == _INTERRUPTED:
        terminal.complain("interrupted")
    sys.exit(status)


def _interrupt_again(problem: Any) -> None:
    """Ctrl-C while compiled code calls Python, as Numba does, would be printed and forgotten: repeat it soon after."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(problem)


def _sentence(problem: Any) -> str:
    """What Typer says about a wrong option, as Quell says it."""
    text = problem.format_message().rstrip(".")
    path = "quell" if problem.ctx is None else problem.ctx.command_path
    return f"{text[:1].lower()}{text[1:]}{' See' if text.endswith('?') else ': see'} {path} --help"
