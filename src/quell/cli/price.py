"""`quell price`."""

from __future__ import annotations

from quell.cli import options, terminal
from quell.errors import QuellError
from quell.files import PLAN, require_writable
from quell.planning import named_plan
from quell.show import tables, words


@options.shared(options.run_options, options.mechanism_options)
def price(given: options.Given, save: options.Save = None, as_json: options.AsJson = False) -> None:
    """Price one mechanism: the noise it needs for the promise, and the error that this noise causes."""
    run, values = options.run_of("price", given), options.values_of(given)
    if several := [name for name, chosen in values.items() if len(chosen) > 1]:
        raise QuellError(f"price takes one value for {several[0]}: use quell compare for several")
    if save is not None and run.examples is None:
        raise QuellError("--save writes a plan for your data: give --examples and --batch-size instead of --steps")
    require_writable((save, PLAN))
    with terminal.progress() as advance:
        plan = named_plan(run, given["mechanism"], advance, **{name: chosen[0] for name, chosen in values.items()})
        if save is not None:
            plan.save(save)
    if as_json:
        terminal.print_json(plan.prices.as_dict(plan.mechanisms))
        return
    terminal.console.print(
        tables.mechanism_table(plan.mechanisms, plan.prices.dpsgd.rmse, width=terminal.width(), explain=False)
    )
    for line in words.details(run, plan.mechanism):
        terminal.say(line)
    terminal.say_written([save])
