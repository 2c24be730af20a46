"""What only a page has: ε on a scale, the command to copy for a row, and an explanation of every term."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from quell.errors import at_least
from quell.run import DEFAULT_OBJECTIVE
from quell.schemes import SCHEMES
from quell.show import words
from quell.show.legend import COLUMNS

if TYPE_CHECKING:
    from quell.planning import Mechanism, Plan
    from quell.run import Run

_TERMS = {
    "Noise": "How much less error (RMSE) the noise leaves in the model than that of DP-SGD, at the same ε and δ.",
    "Promise": "ε is the privacy budget: no conclusion from the model becomes more likely by more than a factor e^ε "
    "because one {unit} was in the data. Smaller is more private. δ is the probability with which that may fail; it "
    "should be far below 1 divided by the number of {drawn}s.",
    "Cost": "Vectors of the size of the model that are kept between steps to make the noise, 4 bytes per parameter "
    "each, and noise vectors that are made at every step.",
    "Proof": "Certified means proven: an accountant has checked that this noise keeps the promise, with every error of "
    "its own counted. Estimated noise is close to that, and is not a promise.",
    "mechanism": "How the noise of different steps is correlated: later noise cancels a part of earlier noise.",
    "noise is": "Whether the noise is certified to keep the promise, or only estimated.",
    "amplification": "Batches that are drawn at random, and kept secret, hide who took part in a step. The same "
    "promise then needs less noise.",
    "clip norm": "Before noise is added, what each {unit} contributes to a step is shortened to at most this length.",
    "DP-SGD": "The usual way of training with privacy: independent noise at every step.",
    "promise": "(ε, δ)-DP: differential privacy with the budget ε and the failure probability δ.",
}
_STRONG, _WEAK = 1.0, 10.0  # ε below and above which a promise is called strong and weak
_USUAL: dict[str, Any] = {"momentum": 0.0, "weight_decay": 1.0, "learning_rates": None, "adaptive": False, "ema": None}
_USUAL |= {"sampling": "best", "objective": DEFAULT_OBJECTIVE, "memory": 4.0, "draws": 16}
_FLAGS = {"learning_rates": "schedule"}  # arguments of a run whose option has another name


def strength(epsilon: float) -> str:
    """How strong a promise with this ε is, in the words of the scale."""
    if epsilon < _STRONG:
        return "strong privacy"
    return "weak privacy" if epsilon > _WEAK else "a common level of privacy"


def scale(epsilon: float) -> dict[str, Any]:
    """ε on a scale from strong to weak."""
    return {
        "epsilon": epsilon,
        "bounds": [_STRONG, _WEAK],
        "words": ["strong: below 1", "common: 1 to 10", "weak: above 10"],
        "text": f"ε = {at_least(epsilon)} is {strength(epsilon)}. Below 1 is strong, 1 to 10 is common, above 10 is "
        "weak.",
    }


def command(run: Run, mechanism: Mechanism) -> str | None:
    """The command that certifies this mechanism and saves the plan; None where options cannot state the run."""
    given = run.arguments
    if run.examples is None or run.drawn == "group" or isinstance(given["learning_rates"], tuple):
        return None
    names = (f"{run.drawn}s", "batch_size", "epochs", "epsilon", "delta", "separation", "participations", *_USUAL)
    options = []
    for name in names:
        value = given.get(name)
        if name in given and value != _USUAL.get(name):
            flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
            text = "unlimited" if name == "memory" and value is None else _typed(value)
            options.append(flag if value is True else f"{flag} {text}")
    return f"quell plan {' '.join(options)} --mechanism {shlex.quote(words.label(mechanism))} --save plan.json"


def _typed(value: object) -> str:
    """A value as people type it: 8 instead of 8.0."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def glossary(plan: Plan) -> dict[str, str]:
    """An explanation of every term on a plan's page, in sentences."""
    run, mechanisms = plan.run, plan.alternatives
    texts = {term: text.format(unit=run.promise.unit, drawn=run.drawn) for term, text in _TERMS.items()}
    texts |= {title: _sentence(full) for title, (_, full) in COLUMNS.items()}
    texts["batches"] = texts.pop("sampling")
    texts |= {mechanism.name: _sentence(mechanism.family.summary) for mechanism in mechanisms}
    return texts | {m.sampling: SCHEMES[m.sampling].words.format(unit=run.drawn) for m in mechanisms}


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."
