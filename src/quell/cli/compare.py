"""`quell compare`."""

from __future__ import annotations

import csv
import sys
from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.errors import QuellError
from quell.mechanism import Mechanism
from quell.show import plots, tables
from quell.strategy import build


def compare(
    mechanism: Annotated[str, typer.Argument(help="A mechanism's name; see quell mechanisms.")],
    steps: options.Steps,
    epochs: options.Epochs,
    epsilon: options.Epsilon,
    delta: options.Delta,
    bands: options.Bands = None,
    lambda_: options.Lambda = None,
    gamma: options.Gamma = None,
    buffers: options.Buffers = None,
    horizon: options.Horizon = None,
    divergence: options.Divergence = None,
    objective: options.Objective = None,
    column_normalise: options.Normalise = None,
    separation: options.Separation = None,
    momentum: options.Momentum = 0.0,
    weight_decay: options.WeightDecay = 1.0,
    schedule: options.Schedule = None,
    sampling: options.Sampling = "cyclic",
    as_csv: Annotated[bool, options.option("Print CSV instead of a table.", "--csv", panel=options.OUTPUT)] = False,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Price one mechanism for several values of one parameter: 2,4,8 or start:stop:count."""
    problem = options.problem_of(steps, epochs, separation, epsilon, delta, momentum, weight_decay, schedule, sampling)
    values = options.values_of(bands, lambda_, gamma, buffers, horizon, divergence, objective, column_normalise)
    several = [name for name, given in values.items() if len(given) > 1]
    if len(several) != 1:
        raise QuellError("compare sweeps exactly one parameter: give several values to one, for example --bands 2,4,8")
    (swept,) = several
    fixed = {name: given[0] for name, given in values.items()}
    priced: list[Mechanism] = []
    with terminal.progress() as advance:
        for done, value in enumerate(values[swept]):
            advance(done, len(values[swept]), f"{swept}={value:g}")
            strategy = build(mechanism, problem.workload, problem.cycle.participation, None, **{**fixed, swept: value})
            # A reader takes the best row, so certificates by draws share their failure probability.
            priced.append(problem.priced(strategy, comparisons=len(values[swept])))
    if plot is not None:
        plots.draw_sweep(problem, swept, priced, problem.dpsgd.rmse, problem.lower_bound, plot)
    rows = [problem.row(row) for row in priced]
    if as_json:
        terminal.print_json(rows)
    elif as_csv:
        columns = [key for key in rows[0] if key not in ("guarantee", "solution")]
        writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    else:
        terminal.console.print(tables.mechanism_table(priced, problem.dpsgd.rmse, width=terminal.console.width))
        terminal.say_written([plot])
