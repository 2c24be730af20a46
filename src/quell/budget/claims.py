"""What a charged run or search claims, with the plain data from which anybody can compute the claim again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quell import privacy
from quell.errors import QuellError
from quell.planning.file import certified
from quell.planning.mechanism import Mechanism
from quell.planning.prices import Prices
from quell.privacy import Profile, certify
from quell.privacy.composition import Charge, Together, repeated
from quell.privacy.selection import Trials, selected, selected_epsilon, worst_of
from quell.show.words import whom

ALL = "all"  # the law of a fixed number of trials, all of which are released
Kind = tuple[Prices, Mechanism]  # what one trial may run


@dataclass(frozen=True)
class Claim:
    """(epsilon, delta)-DP per `unit`, and what is known of δ at every ε; `content` is what it was computed from."""

    unit: str
    epsilon: float
    delta: float
    profile: Profile
    content: dict[str, Any]


def run_claim(prices: Prices, mechanism: Mechanism) -> Claim:
    """The claim of one run; takes certificates where the scheme needs them."""
    guarantee, planned, scheme = mechanism.guarantee, prices.run, prices.scheme_of(mechanism)
    if guarantee.scheme != scheme:  # certified for another run
        certify(mechanism.strategy, scheme, mechanism.noise_multiplier, guarantee.epsilon, guarantee.delta)
    if (guarantee.epsilon, guarantee.delta) != (planned.epsilon, planned.delta):  # a mechanism of another plan
        planned = planned.changed(epsilon=guarantee.epsilon, delta=guarantee.delta)
    content = plan_of(planned.as_dict(), mechanism.as_dict(planned.objective))
    return Claim(_unit(prices), guarantee.epsilon, guarantee.delta, _profile(prices, mechanism), content)


def search_claim(trials: Trials | int, kinds: Sequence[Kind], delta: float) -> Claim:
    """The claim of a search at `delta`: the least ε that is known for all of it.

    Args:
        trials: A random number of trials, of which only the best is released; or a fixed number, all of which may be.
        kinds: What one trial may run. Trials may choose between them.
        delta: The δ of the search.
    """
    unit, *others = dict.fromkeys(_unit(prices) for prices, _ in kinds)
    if others:
        raise QuellError(f"trials of a search promise privacy per {unit} and per {others[0]}: plan all of them per one")
    profiles = [_profile(prices, mechanism) for prices, mechanism in kinds]
    plans = [plan_of(prices.run.as_dict(), mechanism.as_dict(prices.run.objective)) for prices, mechanism in kinds]
    profile: Profile
    if isinstance(trials, Trials):
        epsilon, profile = selected_epsilon(profiles, trials, delta), selected(profiles, trials, delta)
    else:
        profile = repeated(worst_of(profiles, delta), trials, delta)
        epsilon = Together((Charge(profile, math.inf, delta),)).epsilon(delta)
    if not math.isfinite(epsilon):
        raise QuellError(f"no ε is known for this search at δ = {delta:g}: give its trials a smaller epsilon or delta")
    content = {"trials": as_plain(trials), "delta": delta, "plans": plans}
    return Claim(unit, epsilon, delta, profile, content)


def claim_again(content: dict[str, Any]) -> Claim:
    """The claim of plain data, with the noise of every plan in it certified anew; raises `QuellError` if it fails."""
    if "plans" not in content:
        return run_claim(*certified(content.get("run"), content.get("mechanism")))
    try:
        kinds = [certified(each["run"], each["mechanism"]) for each in content["plans"]]
        return search_claim(from_plain(content["trials"]), kinds, float(content["delta"]))
    except (KeyError, TypeError, ValueError) as problem:
        if isinstance(problem, QuellError):
            raise
        raise QuellError("a search is damaged: restore the file from a copy") from None


def plan_of(run: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that decides privacy: the run, and what makes one mechanism of it what it is."""
    kept: dict[str, Any] = {name: row[name] for name in ("family", "parameters", "solution") if name in row}
    kept |= {"noise": {"multiplier": row["noise"]["multiplier"]}, "error": {}}
    return {"run": run, "mechanism": {**kept, "guarantee": {"sampling": row["guarantee"]["sampling"]}}}


def as_plain(trials: Trials | int) -> dict[str, Any]:
    return trials.as_dict() if isinstance(trials, Trials) else {"mean": float(trials), "law": ALL}


def from_plain(content: dict[str, Any]) -> Trials | int:
    return int(content["mean"]) if content["law"] == ALL else Trials(**content)


def _unit(prices: Prices) -> str:
    return whom(prices.run.drawn, prices.run.promise.unit)


def _profile(prices: Prices, mechanism: Mechanism) -> Profile:
    return privacy.profile(mechanism.strategy, prices.scheme_of(mechanism), mechanism.guarantee)
