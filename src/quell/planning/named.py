"""A plan of the one mechanism that was named, certified for a run: what makes any row of a table a plan file."""

from __future__ import annotations

from dataclasses import replace

from threadpoolctl import threadpool_limits

from quell.planning.mechanism import Mechanism
from quell.planning.planner import COMPARISONS, Plan
from quell.planning.prices import Prices
from quell.planning.search import Progress
from quell.run import Run
from quell.strategy import Parameter, Strategy
from quell.strategy.spelling import read


def named_plan(run: Run, mechanism: str, /, progress: Progress | None = None, **parameters: Parameter) -> Plan:
    """Certify one mechanism with the least noise that keeps the promise, under the best of the run's schemes.

    Naming a mechanism is the choice, so the run's limits are raised to what it needs. Its certificate is made as those
    of a search are: by draws it shares its failure probability with others that a reader may compare it with.

    Args:
        run: What is trained and promised.
        mechanism: The mechanism as tables show it, such as "bisr* p=16", or a family's name.
        progress: Called with (done, total, what) before each of the two parts.
        parameters: The family's parameters, where the text has none.

    Returns:
        A plan of this mechanism alone; raises `QuellError` if it cannot be built or certified for the run.

    >>> run = Run.from_data(examples=1000, batch_size=100, epochs=3, epsilon=8, delta=1e-5, sampling="cyclic")
    >>> named_plan(run, "bisr p=4").mechanism.name
    'bisr'
    """
    family, settings = read(mechanism, **parameters)
    prices = Prices(run)
    with threadpool_limits(1):
        if progress is not None:
            progress(0, 2, f"building {mechanism}")
        strategy = prices.build(family, **settings)
        if progress is not None:
            progress(1, 2, f"certifying {mechanism}")
        certified = prices.certify(strategy, comparisons=COMPARISONS)
    return plan_of(run, certified)


def plan_of(run: Run, certified: Mechanism) -> Plan:
    """A plan of one certified mechanism, with the run's limits raised to what it needs."""
    return Plan(_with_room(run, certified.strategy), (certified,), 0)


def _with_room(run: Run, strategy: Strategy) -> Run:
    limits, needed = run.limits, strategy.recurrence
    if limits.fits(needed):
        return run
    memory = None if limits.memory is None else max(limits.memory, float(needed.buffers))
    wider = replace(limits, memory=memory, draws=max(limits.draws, needed.draws))
    return replace(run, limits=wider if wider.fits(needed) else replace(wider, time_limit=None))
