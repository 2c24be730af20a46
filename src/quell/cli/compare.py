"""`quell compare`."""

from __future__ import annotations

import csv
import sys
from typing import Annotated, Any

from quell.cli import options, terminal
from quell.errors import QuellError
from quell.files import PLOT, require_writable
from quell.planning import Mechanism, Prices
from quell.show import plots, tables
from quell.strategy.spelling import read


@options.shared(options.run_options, options.mechanism_options)
def compare(
    given: options.Given,
    as_csv: Annotated[bool, options.output("Print CSV instead of a table.", "--csv")] = False,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Price one mechanism for several values of one parameter: 2,4,8 or start:stop:count."""
    prices, values = Prices(options.run_of("compare", given)), options.values_of(given)
    require_writable((plot, PLOT))
    if plot is not None:
        plots.require_picture(plot)
    several = [name for name, chosen in values.items() if len(chosen) > 1]
    if len(several) != 1:
        raise QuellError("compare sweeps exactly one parameter: give several values to one, for example --bands 2,4,8")
    (swept,) = several
    family, fixed = read(given["mechanism"], **{name: chosen[0] for name, chosen in values.items()})
    priced: list[Mechanism] = []
    with terminal.progress() as advance:
        for done, value in enumerate(values[swept]):
            advance(done, len(values[swept]), f"{swept}={value:g}")
            strategy = prices.build(family, **{**fixed, swept: value})
            # A reader takes the best row, so certificates by draws share their failure probability.
            priced.append(prices.certify(strategy, comparisons=len(values[swept])))
        if plot is not None:
            plots.draw_sweep(prices.run, swept, priced, prices.dpsgd.rmse, prices.lower_bound, plot)
    if as_json:
        terminal.print_json(prices.as_dict(priced))
    elif as_csv:
        rows = [_flat(row.as_dict()) for row in priced]
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        best = min(priced, key=lambda mechanism: mechanism.rmse)
        table = tables.mechanism_table(priced, prices.dpsgd.rmse, best=best, width=terminal.width(), explain=False)
        terminal.console.print(table)
        terminal.say_written([plot])


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row as one table: parameters and numbers under their own names, without the coefficients."""
    return {
        "family": row["family"],
        **row["parameters"],
        "noise_multiplier": row["noise"]["multiplier"],
        "kept": row["noise"]["buffers"],
        "draws": row["noise"]["draws"],
        **row["error"],
        **row["guarantee"],
    }
