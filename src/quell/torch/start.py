"""How a run starts: its data and optimizer are compared with the plan, then noise and batches are made of one key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from quell.adapters.choice import select
from quell.adapters.scheme import batches_of, scheme_of
from quell.adapters.secrets import opened
from quell.adapters.users import owned_rows, require_planned_units
from quell.budget import Budget, Entry
from quell.budget.claims import run_claim
from quell.budget.entry import entry_of
from quell.errors import QuellError
from quell.noise import Key
from quell.torch.checks import refuse_repeated_rows, warn_about_optimizer, warn_about_sampler
from quell.torch.distributed import agree, decided, share_key, together, world
from quell.torch.loader import dataset_of
from quell.torch.noise import CorrelatedNoise
from quell.torch.run import TrainingRun

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan


@dataclass(frozen=True)
class NoiseOptions:
    """What `make_private` and `attach` let the user decide about the noise, beyond the plan."""

    mechanism: str | Mechanism | None
    key: Key | str | Path | None
    seed: int | None
    ledger: str | Path | None
    generator: str
    memory: float
    budget: str | Path | None = None

    def secrets(self, rank: int) -> tuple[Key, Path | None]:
        """The run's key on every rank, and where its ledger lies: on rank 0, which keeps it for all."""
        if self.seed is not None:
            key, ledger = opened(self.key, self.seed, self.ledger)
            return key, None if rank else ledger
        own, ledger = together(lambda: (None, None) if rank else opened(self.key, None, self.ledger))
        return share_key(own), ledger

    def require_one_charge(self, key: Key, ledger: Path | None) -> None:
        """On rank 0: refuse a budget where nobody would notice that another run has this key."""
        if isinstance(self.key, Key) and key.loaded and ledger is None:
            raise QuellError(
                "budget= with a key that was loaded, or made before a fork, would charge several runs of it once: "
                "pass the path of the key file, or ledger= as well"
            )


@contextmanager
def started_run(
    optimizer: Optimizer,
    params: Mapping[str, nn.Parameter],
    data: Any,
    plan: Plan,
    max_grad_norm: float,
    options: NoiseOptions,
    users: Any = None,
    rows_per_user: int = 1,
) -> Iterator[TrainingRun]:
    """A run that lasts, unless what is built on it inside the `with` fails: then its key is free for the next try."""
    dataset: Any = dataset_of(data)
    if users is None and plan.run.drawn != "example":
        users = getattr(dataset, "users", None)
    ids = users.detach().cpu().numpy() if isinstance(users, Tensor) else users
    numbers = require_planned_units(plan, ids, rows_per_user, len(dataset))
    if numbers is None:
        refuse_repeated_rows(dataset)
    warn_about_optimizer(plan, optimizer)
    warn_about_sampler(data)
    rank, size = world()
    chosen = select(plan, options.mechanism)
    scheme = scheme_of(plan, chosen)
    key, ledger = options.secrets(rank)
    batches = batches_of(plan, scheme, key)
    owned = None if numbers is None else owned_rows(numbers, plan, rows_per_user, key)
    noise = together(
        lambda: CorrelatedNoise(
            chosen,
            params,
            max_grad_norm,
            key=key,
            generator=options.generator,
            memory=options.memory,
            ledger=ledger,
            replay=True,  # a run that crashed before its first checkpoint starts again: the same steps, or none
            agree=agree if size > 1 else None,
        )
    )
    key_kept = options.key is not None or options.seed is not None
    run = TrainingRun(plan, chosen, batches, noise, rank, size, key_kept, owned)
    try:
        run.share_released()
        if options.budget is not None:
            decided(lambda: options.require_one_charge(key, ledger))
            run.charge = _charging(plan, chosen, key, options.budget)
        yield run
    except BaseException:
        run.close()
        raise


def _charging(plan: Plan, mechanism: Mechanism, key: Key, path: str | Path) -> Callable[[], object]:
    """Refuse a run that its budget has no room for; the function that charges it, on rank 0, for all to call together.

    The run is named by its key, so one that is resumed is not charged again.
    """
    if key.seeded:
        raise QuellError("a run with a seed has no privacy that a budget could count: leave out seed, or budget")

    @cache
    def entry() -> Entry:  # on rank 0 alone, which tells the others if it is refused
        return entry_of(run_claim(plan.prices, mechanism), key.id)

    decided(lambda: Budget(path).require_room(entry()))
    return lambda: decided(lambda: Budget(path).add(entry()))
