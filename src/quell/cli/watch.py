"""`quell watch`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from quell.cli import options, terminal
from quell.files import PAGE, require_writable
from quell.show import page
from quell.show.watching import watch_content, watch_page, watch_table

_SECONDS = 1.0  # between two looks at the log
_RELOAD = 5  # seconds after which the page loads itself again


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder that make_private(..., log=FOLDER) writes to.")],
    once: Annotated[bool, options.output("Show how the run stands now, and stop.", "--once")] = False,
    html: Annotated[Path | None, options.output("Also write a page, again and again: it reloads itself.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a run while it trains, from its log, until the run ends or you press Ctrl-C."""
    from quell.watching.reading import Follower

    require_writable((html, PAGE))
    follower = Follower(folder)
    follower.poll()
    stay = terminal.console.is_terminal and not (once or as_json)

    def look() -> dict[str, object]:
        content = watch_content(str(follower.folder), follower.about, follower.rows)
        if html is not None:
            page.write(watch_page(content, _RELOAD if stay else None), html, owner_only=bool(content["not_private"]))
        return content

    content = look()
    if as_json:
        terminal.print_json(content)
        return
    if not stay:
        terminal.console.print(watch_table(content, terminal.console.width))
        terminal.say_written([html])
        return
    try:
        with Live(watch_table(content, terminal.console.width), console=terminal.console, auto_refresh=False) as live:
            while not follower.ended:
                time.sleep(_SECONDS)
                if follower.poll():
                    live.update(watch_table(look(), terminal.console.width), refresh=True)
    except KeyboardInterrupt:
        terminal.say("Stopped watching; the run goes on.")
