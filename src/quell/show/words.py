"""Every sentence about plans, guarantees and runs: numbers in, strings out.

The terminal, the page, the privacy report and notebooks all take their sentences from here, so that one fact is said
in one way. Nothing is computed here and no sentence is taken apart again elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quell.errors import at_least
from quell.run import DEFAULT_OBJECTIVE, OBJECTIVES
from quell.strategy import INDEPENDENT
from quell.strategy.family import HORIZON
from quell.strategy.spelling import spelled

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.planning.questions import Answers, EpochChoice
    from quell.privacy import Estimate, Guarantee, Meaning
    from quell.run import Run

_CHANGES = {"epochs": "Twice the epochs", "batch_size": "Batches twice as large"}
SEEDED = "The key was made from a seed: this run has NO privacy guarantee."
NOTABLE = 1.01  # the smallest gain over DP-SGD, an estimate, that deserves a number
MORE = "Add --explain to see why this one was chosen, what would change that, and what the words mean."
_SAME_RATE = 0.1  # learning rates that differ by less are called the same
_DIGITS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# Numbers


def number(value: float) -> str:
    """δ, rounded up, with a power of ten where it is small.

    >>> number(1e-5), number(2.5e-7), number(0.001)
    ('10⁻⁵', '2.5·10⁻⁷', '0.001')
    """
    return _power_of_ten(at_least(value))


def _power_of_ten(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return mantissa
    power = f"10{str(int(exponent)).translate(_DIGITS)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"


def noise(multiplier: float, estimated: bool = False) -> str:
    """σ wherever it is read: four digits, rounded up, or about three of an estimate.

    >>> noise(2.27216), noise(2.27216, estimated=True)
    ('2.273', '~2.28')
    """
    return f"~{at_least(multiplier, 3)}" if estimated else at_least(multiplier, 4)


def times(ratio: float) -> str:
    """How many times, wherever it is read.

    >>> times(1.084), times(4.366), times(1234.5)
    ('1.08', '4.4', '1,234')
    """
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"


def amount(value: float) -> str:
    """An error wherever it is read: four digits, with a power of ten where it is very small or large.

    >>> amount(2.27199), amount(12345.6), amount(0.00012345)
    ('2.272', '12,350', '1.234·10⁻⁴')
    """
    if value and not 1e-3 <= abs(value) < 1e7:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return _power_of_ten(f"{float(mantissa):g}e{exponent}")
    return f"{float(f'{value:.4g}'):,.10g}"


def counted(count: int, thing: str) -> str:
    """
    >>> counted(1, "model copy"), counted(3900, "step")
    ('1 model copy', '3,900 steps')
    """
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def copies(buffers: int) -> str:
    return counted(buffers, "model copy") if buffers else "no extra memory"


# Mechanisms and guarantees


def label(mechanism: Mechanism) -> str:
    """Family and parameters, short enough for a table; `quell plan --mechanism` takes it."""
    return spelled(mechanism.strategy)


def whom(drawn: str, unit: str = "example") -> str:
    """Whom a promise protects, where batches are drawn of `drawn`; `unit` is that of batches of examples."""
    return {"example": unit, "user": "user", "group": "user with public ownership of examples"}[drawn]


def promise(guarantee: Guarantee, unit: str = "example") -> str:
    """The promise in one line, without a full stop: ε, δ, whom it protects and how batches are formed."""
    return (
        f"{level(guarantee.epsilon, guarantee.delta)} per {unit} ({guarantee.adjacency} neighbours) under "
        f"{guarantee.sampling} sampling"
    )


def level(epsilon: float, delta: float) -> str:
    return f"({at_least(epsilon)}, {number(delta)})-DP"


def method(guarantee: Guarantee) -> str:
    """The kind of accounting that the promise rests on."""
    return "Monte-Carlo accounting" if guarantee.failure_probability else guarantee.method


def proof(guarantee: Guarantee) -> str:
    """How the promise is known."""
    return f"Certified {certified_by(guarantee)}."


def certified_by(guarantee: Guarantee) -> str:
    if guarantee.failure_probability:
        return f"by {method(guarantee)} ({guarantee.draws:,} draws, {failure(guarantee.failure_probability)})"
    return f"by the {method(guarantee)} (sensitivity: {guarantee.sensitivity.kind})"


def failure(probability: float) -> str:
    return f"failure probability {_power_of_ten(f'{probability:.1g}')} included in δ"


def estimated(estimate: Estimate) -> str:
    return f"Estimated, not certified: {level(estimate.epsilon, estimate.delta)} under {estimate.sampling} sampling."


def attacker(meaning: Meaning, unit: str) -> str:
    """What the best attacker can find out, in two sentences."""
    alone, *groups = meaning.true_positives.items()
    accused, found = zip(*((percent(rate), percent(share)) for rate, share in alone[1].items()), strict=True)
    exact = "" if meaning.mu is None else f" (Gaussian DP with μ = {at_least(meaning.mu, 4)})"
    others = [f"{' and '.join(map(percent, row.values()))} for {size} {unit}s" for size, row in groups]
    return (
        f"The best attack on who was in the data finds at most {found[0]} of the {unit}s that were used if it "
        f"wrongly accuses {accused[0]} of others, and {found[1]} if it accuses {accused[1]}{exact}. "
        f"It finds groups more easily: {', '.join(others)}."
    )


def percent(share: float) -> str:
    """
    >>> percent(0.001), percent(0.3372), percent(1.0)
    ('0.1%', '33.8%', '100%')
    """
    return f"{at_least(100 * share, 3)}%"


def details(run: Run, mechanism: Mechanism) -> list[str]:
    """What lies behind one row: sensitivity, promise, and how an optimised strategy was found."""
    guarantee, how, pattern = mechanism.guarantee, mechanism.strategy.convergence, run.participation
    moved = guarantee.sensitivity
    lines = [
        f"Sensitivity: {moved.value:.6g} ({moved.kind}; {moved.method}), if one {run.promise.unit} is used at most "
        f"{counted(pattern.count, 'time')}, at least {counted(pattern.separation, 'step')} apart.",
        f"Promise: {promise(guarantee, whom(run.drawn, run.promise.unit))}. {proof(guarantee)}",
    ]
    if how is not None:
        lines.append(
            f"Optimised in {counted(how.iterations, 'iteration')}: largest gradient entry {how.gradient_norm:.1e}, "
            f"last improvement {how.last_improvement:.1e}. {how.reason}"
        )
    return lines


# Plans


def describe_run(run: Run) -> str:
    """The run and its target in one line."""
    pattern, data = run.participation, ""
    if run.examples is not None:
        data = f"{counted(run.examples, run.drawn)}, batches of {run.batch_size:,}, "
    uses = (
        f" Each user takes part at most {counted(pattern.count, 'time')}, at least "
        f"{counted(pattern.separation, 'step')} apart."
        if run.own_pattern
        else ""
    )
    ema = run.optimizer.ema
    uses += "" if ema is None else f" RMSE is that of averaged weights (ema {ema:g})."
    return (
        f"{data}{counted(run.epochs, 'epoch')}: {counted(run.steps, 'step')}.{uses} "
        f"Target: {level(run.epsilon, run.delta)} per {whom(run.drawn, run.promise.unit)}."
    )


def notes(run: Run) -> list[str]:
    """Warnings about a run."""
    found = [] if run.examples is None else too_likely(run.delta, run.examples, run.drawn)
    if run.examples is not None and run.batch_size and (left := run.examples % run.batch_size):
        rest = f"the {left:,} left over make" if left > 1 else "the one left over makes"
        found.append(
            f"{run.examples:,} {run.drawn}s do not divide into batches of {run.batch_size:,}: an epoch has "
            f"{counted(run.steps_per_epoch, 'step')}, and {rest} some batches larger."
        )
    return found


def too_likely(delta: float, count: int, drawn: str) -> list[str]:
    """What is wrong with a δ above 1/count, where there are `count` of what is `drawn`; nothing below."""
    if delta * count <= 1:
        return []
    return [
        f"δ = {number(delta)} is above 1/{drawn}s = {1 / count:.2g}: such a guarantee would allow publishing a whole "
        f"{drawn}."
    ]


def recommendation(plan: Plan, answers: Answers) -> str:
    """What to use, and what you gain by it."""
    chosen = plan.mechanism
    use = f"{chosen.sampling} sampling and noise multiplier {noise(chosen.noise_multiplier)}"
    if chosen.family is INDEPENDENT:
        why = (
            " At this privacy budget and number of steps, random batches help independent noise more than "
            "correlated noise."
            if chosen.scheme.amplifies
            else ""
        )
        alone = len(plan.alternatives) == 1  # named, not found by a search
        return f"Use DP-SGD with {use}.{'' if alone else f' Nothing within your limits does better here.{why}'}"
    memory = f"{copies(chosen.buffers)}{' of memory' if chosen.buffers else ''}"
    gain, target = answers.dpsgd.rmse / chosen.rmse, level(plan.run.epsilon, plan.run.delta)
    bought = (
        f"At the same {target} its noise leaves {times(gain)} times less error (RMSE) in the model than DP-SGD's. "
        f"DP-SGD would need ε = {equal_epsilon(answers)} for equally little noise."
        if gain >= NOTABLE
        else f"Its RMSE is {'hardly' if gain > 1 else 'no'} better than that of DP-SGD at the same {target}."
    )
    return f"Use {label(chosen)} with {use}: {memory}, {counted(chosen.draws, 'noise vector')} per step. {bought}"


def equal_epsilon(answers: Answers) -> str:
    """The ε at which DP-SGD would have as little noise."""
    return f"{answers.equivalent_epsilon:.3g}" if answers.equivalent_epsilon < 1000 else "1000 or more"


def explanation(plan: Plan, answers: Answers) -> list[str]:
    """The recommendation and the reasons."""
    return [recommendation(plan, answers), *reasons(plan, answers)]


def reasons(plan: Plan, answers: Answers) -> list[str]:
    """The other choice, what would change the answer, the bound, the promise, and what it asks of training."""
    chosen, objective, lines = plan.mechanism, plan.run.objective, list[str]()
    affordable = [mechanism for mechanism in plan.alternatives if plan.run.limits.fits(mechanism)]
    other = min(affordable, key=lambda mechanism: mechanism.rmse)
    if objective == DEFAULT_OBJECTIVE and other is not chosen and other.rmse < 0.99 * chosen.rmse:
        worse = " but usually trains worse" if other.buffers > 0 or other.draws > 1 else ""
        lines.append(
            f"{label(other)} with {other.sampling} sampling has lower RMSE ({amount(other.rmse)} instead of "
            f"{amount(chosen.rmse)}){worse}. To choose it anyway: --objective rmse."
        )
    first = min(affordable, key=lambda mechanism: mechanism.score(objective))
    if first is not chosen and not first.certified:
        lines.append(
            f"The leaders are within estimation error of each other ({label(first)} is estimated to be "
            f"{1 - first.score(objective) / chosen.score(objective):.1%} better); this one was certified."
        )
    if answers.frontier:
        lines.append(
            " ".join(
                f"Best with{'out extra memory' if not each.buffers else f' {copies(each.buffers)}'}: {label(each)} "
                f"({OBJECTIVES[objective].title} {amount(each.score(objective))})."
                for each in answers.frontier
            )
        )
    title, compared = OBJECTIVES[objective].title, OBJECTIVES[objective].compares(plan.run.drawn)
    for change in answers.changes:
        if abs(1 - change.ratio) >= 0.005:
            more = _CHANGES.get(change.what) or f"Memory for {copies(change.mechanism.buffers)}"
            lines.append(
                f"{more} would {'lower' if change.ratio < 1 else 'raise'} the "
                f"{title if change.what == 'memory' else compared} by {abs(1 - change.ratio):.0%} "
                f"({label(change.mechanism)}, {change.mechanism.sampling} sampling)."
            )
    ratio = chosen.rmse / answers.lower_bound
    lines.append(
        f"The best possible RMSE without random batches is {amount(answers.lower_bound)}; this plan is "
        f"{abs(ratio - 1):.0%} {'above' if ratio >= 1 else 'below'} it."
    )
    protected = whom(plan.run.drawn, plan.run.promise.unit)
    lines.append(f"Promise: {promise(chosen.guarantee, protected)}. {proof(chosen.guarantee)}")
    if answers.meaning is not None:
        lines.append(f"Meaning: {attacker(answers.meaning, plan.run.promise.unit)}")
    if chosen.scheme.amplifies:
        lines.append(f"It holds only if batches are formed by {chosen.sampling} sampling, as Quell's loaders do.")
    return lines + learning_rate(plan, answers)


def learning_rate(plan: Plan, answers: Answers) -> list[str]:
    """What the noise asks of the learning rate, if anything."""
    if plan.mechanism.family is INDEPENDENT:
        return []
    if answers.learning_rate is None:
        usual = "4 to 40" if plan.run.optimizer.adaptive else "1 to 10"
        return [
            f"This noise cancels from step to step: its best learning rate is usually {usual} times that of DP-SGD."
        ]
    same = abs(answers.learning_rate - 1) <= _SAME_RATE
    rate = "the same learning rate as" if same else f"about {answers.learning_rate:.2g} times the learning rate of"
    return [
        f"This noise cancels from step to step: start from {rate} DP-SGD (a prediction; docs/learning-rates.md says "
        "how good it is)."
    ]


def other_designs(mechanism: Mechanism) -> str | None:
    """That a named mechanism was built with one of several possible designs, if nobody named its horizon."""
    if HORIZON not in mechanism.family.optional or HORIZON in mechanism.strategy.parameters:
        return None
    return "No h was named, so this design looks back over the whole run. A search without --mechanism tries others."


def usual_delta(run: Run) -> str:
    """What δ is where none was given."""
    return (
        f"δ = {number(run.delta)} is the default, the largest power of ten up to 1/(10 · {run.drawn}s). To choose "
        "another: --delta."
    )


def best_choice(choice: EpochChoice) -> str:
    """The end of a comparison of ways to spend a fixed number of steps."""
    return (
        f"Of these, {counted(choice.run.epochs, 'epoch')} with batches of {choice.run.batch_size:,} have the least "
        f"{OBJECTIVES[choice.run.objective].compares(choice.run.drawn)} (estimated: plan that run to certify it)."
    )
