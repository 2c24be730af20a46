"""`quell price`."""

from __future__ import annotations

from typing import Annotated

import typer

from quell.cli import options, terminal
from quell.errors import QuellError
from quell.schemes import FIXED
from quell.show import tables, words


def price(
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
    sampling: options.Sampling = FIXED.name,
    as_json: options.AsJson = False,
) -> None:
    """Price one mechanism: the noise it needs for the promise, and the error that this noise causes."""
    values, prices = options.values_of(locals()), options.prices_of(locals())
    if several := [name for name, given in values.items() if len(given) > 1]:
        raise QuellError(f"price takes one value for {several[0]}: use quell compare for several")
    with terminal.progress():
        priced = prices.price(mechanism, **{name: given[0] for name, given in values.items()})
    if as_json:
        terminal.print_json(prices.as_dict([priced]))
        return
    terminal.console.print(tables.mechanism_table([priced], prices.dpsgd.rmse, width=terminal.console.width))
    terminal.say("\n".join(words.details(prices.run, priced)))
