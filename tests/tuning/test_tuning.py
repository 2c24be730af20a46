"""Searches inside a promise: what they cost, that nothing escapes their count, and how they are charged."""

from __future__ import annotations

import collections
import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from typer.testing import CliRunner

from quell import cli, privacy
from quell.budget import Budget
from quell.errors import QuellError
from quell.privacy import gaussian_epsilon
from quell.privacy.profile import GaussianProfile
from quell.privacy.selection import Trials, selected_epsilon
from quell.tuning import Search, tune, ways
from tests import documented

SMALL = {"examples": 200, "epochs": 2, "epsilon": 4.0, "delta": 1e-4, "memory": 0, "draws": 1}


@pytest.fixture(scope="module")
def fixed():
    return tune(batch_size=20, trials=4, sampling="cyclic", **SMALL)


@pytest.fixture(scope="module")
def everything():
    return tune(batch_size=20, trials=3, law="all", sampling="cyclic", **SMALL)


def test_the_promise_covers_all_trials(fixed, everything):
    mu = _mu(fixed)
    assert 3.999 < fixed.epsilon <= 4.0
    assert fixed.epsilon == pytest.approx(selected_epsilon([GaussianProfile(mu)], Trials(4), 1e-4), rel=1e-9)
    assert everything.epsilon == pytest.approx(gaussian_epsilon(1 / (_mu(everything) * 3**0.5), 1e-4), rel=1e-6)
    assert 3.99 < everything.epsilon <= 4.0
    assert everything.law == "all"


def test_nothing_that_a_search_releases_exceeds_its_promise(fixed):
    """A trial that keeps one normal number, which is all that a Gaussian run tells about an example, in fine cells.

    The best of a geometric number of trials has the distribution function F/(4 − 3F), F being that of one trial.
    """
    edges = np.linspace(-9, 9 + _mu(fixed), 4001)
    laws = [np.diff(norm.cdf(edges, place)) for place in (0.0, _mu(fixed))]
    worst, outcome = 0.0, edges[1:]
    crowded = [np.where(outcome < place, 100.0 - outcome, outcome) for place in np.linspace(-4, 1, 21)]
    for score in (
        outcome,
        -outcome,
        *crowded,
    ):  # the last: what speaks against the example beats all that speaks for it
        order = np.argsort(score)
        released = []
        for law in laws:
            below = np.concatenate([[0.0], np.cumsum(law[order])]).clip(0, 1)
            released.append(np.diff(below / (4 - 3 * below)))
        for ours, theirs in (released, released[::-1]):
            worst = max(worst, brentq(lambda e, p=ours, q=theirs: np.maximum(p - np.exp(e) * q, 0).sum() - 1e-4, 0, 20))
    assert 1.2 * fixed.plans[0].run.epsilon < worst <= fixed.epsilon < 1.1 * worst


def _mu(search):
    (plan,) = search.plans
    return privacy.profile(plan.mechanism.strategy, plan.prices.scheme_of(plan.mechanism), plan.mechanism.guarantee).mu


@pytest.mark.slow
def test_random_batches_and_several_sizes_share_one_promise():
    found = tune(batch_size=(10, 20), trials=3, sampling="poisson", **SMALL)
    assert 0.9 * 4.0 < found.epsilon <= 4.0
    assert [plan.run.batch_size for plan in found.plans] == [10, 20]
    sizes = {trial.plan.run.batch_size for trial in _run(Search(found, {"lr": [1]})) for _ in [0]}
    assert sizes <= {10, 20}


def test_ways_are_compared_before_anything_is_trained():
    compared = ways(8.0, 1e-5, 5, 5)
    assert [way.law for way in compared] == ["geometric", "truncated-poisson", "all"]
    assert compared[-1].noise == pytest.approx(5**0.5)
    assert compared[-1].missed == 0.0
    for way in compared[:2]:
        trials = Trials(5, way.law)
        total = selected_epsilon([GaussianProfile(_of(way.trial_epsilon))], trials, 1e-5)
        assert total == pytest.approx(8.0, rel=1e-6)
    assert ways(8.0, 1e-5, 1.2, 5)[0].law != "all"


def _of(epsilon):
    return 1 / privacy.gaussian_sigma(epsilon, 1e-5)


def _run(search, score=lambda parameters: 0.0):
    for trial in search.trials():
        trial.report(score(trial.parameters), dict(trial.parameters))
        yield trial


def test_the_best_trial_is_kept_and_settings_are_drawn_evenly(fixed):
    seen = collections.Counter()
    for _ in range(150):
        search = Search(fixed, {"lr": [0.1, 1.0], "max_grad_norm": [1, 2]})
        made = list(_run(search, lambda p: -p["lr"]))
        seen.update((trial.parameters["lr"], trial.parameters["max_grad_norm"]) for trial in made)
        assert search.best.parameters["lr"] == min(trial.parameters["lr"] for trial in made)
        assert search.best is next(t for t in made if t.parameters["lr"] == search.best.parameters["lr"])
        assert search.best.result == search.best.parameters
    assert all(0.17 < count / sum(seen.values()) < 0.33 for count in seen.values())
    assert len(seen) == 4
    assert 3.0 < sum(seen.values()) / 150 < 5.2


def test_a_search_cannot_be_stopped_repeated_or_left_without_scores(fixed):
    search = Search(fixed, {"lr": [1]})
    with pytest.raises(QuellError, match="is not finished"):
        search.best  # noqa: B018
    trials = search.trials()
    next(trials)
    with pytest.raises(QuellError, match="ended without a score"):
        next(trials)
    with pytest.raises(QuellError, match="is not finished"):
        search.best  # noqa: B018
    with pytest.raises(QuellError, match="made once"):
        next(search.trials())


def test_scores_that_are_no_numbers_never_win(fixed):
    search = Search(fixed, {"lr": [1]})
    for number, trial in enumerate(search.trials()):
        trial.report(float("nan") if number else -1e9, number)
    assert search.best.result == 0


@pytest.mark.parametrize(
    ("space", "words"),
    [({"lr": []}, "list of values"), ({"lr": "ab"}, "list of values"), ({"batch_size": [1]}, "tune")],
)
def test_spaces_that_make_no_sense_are_refused(fixed, space, words):
    with pytest.raises(QuellError, match=words):
        Search(fixed, space)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"law": "fixed"}, "is not known"), ({"trials": 1}, "between 1 and"), ({"batch_size": (20, 20)}, "different")],
)
def test_searches_that_make_no_sense_are_refused(options, words):
    with pytest.raises(QuellError, match=words):
        tune(**{"batch_size": 20, "trials": 4, "sampling": "cyclic", **SMALL, **options})


def test_a_search_is_charged_as_one_run_before_its_first_trial(tmp_path, fixed, everything):
    budget = Budget.create(tmp_path / "b", name="x", epsilon=7.0, delta=1e-4, fixed_plans=True)
    search = Search(fixed, {"lr": [1]}, budget=budget.path)
    assert budget.spent().runs == 0
    trials = search.trials()
    next(trials)
    assert budget.spent().runs == 1
    assert fixed.epsilon <= budget.spent().epsilon <= 4.0
    list(_run(Search(everything, {"lr": [1]}, budget=budget.path)))
    assert budget.spent().runs == 2
    assert 4.0 < budget.spent().epsilon < 7.0
    with pytest.raises(QuellError, match="does not suffice"):
        next(Search(fixed, {"lr": [1]}, budget=budget.path).trials())
    assert [check.claim for check in budget.verify() if not check.holds] == []
    assert [entry.kind for entry in budget.entries] == ["search", "search"]


class Study:
    """The part of an Optuna study that a search uses: it remembers, and a sampler proposes what is not enqueued."""

    direction = SimpleNamespace(name="MAXIMIZE")

    def __init__(self):
        self.waiting, self.told, self.proposed = [], [], 0

    def enqueue_trial(self, parameters):
        self.waiting.append(parameters)

    def ask(self):
        return Asked(self, self.waiting.pop(0) if self.waiting else None)

    def tell(self, asked, score):
        self.told.append((asked.taken, score))


class Asked:
    def __init__(self, study, fixed):
        self.study, self.fixed, self.taken = study, fixed, {}

    def suggest_categorical(self, name, values):
        if self.fixed is None:
            self.study.proposed += 1
        self.taken[name] = values[-1] if self.fixed is None else self.fixed[name]
        return self.taken[name]


def test_optuna_remembers_trials_and_proposes_only_where_that_is_covered(fixed, everything):
    random = Study()
    made = list(_run(Search(fixed, {"lr": [1, 2]}, study=random), lambda p: p["lr"]))
    assert random.proposed == 0
    assert random.told == [(trial.parameters, trial.parameters["lr"]) for trial in made]
    learning = Study()
    made = list(_run(Search(everything, {"lr": [1, 2]}, study=learning)))
    assert (len(made), learning.proposed) == (3, 3)
    assert {trial.parameters["lr"] for trial in made} == {2}


def test_optuna_itself(fixed, everything):
    """Where it is installed (CI has the stand-in above alone)."""
    optuna = pytest.importorskip("optuna")
    space = {"lr": [0.01, 0.1, 1.0], "layers": [1, None], "norm": ["group", "none"]}
    for plan in (fixed, everything):
        study = optuna.create_study(direction="maximize")
        search = Search(plan, space, study=study)
        made = list(_run(search, lambda p: -p["lr"]))
        assert [(each.params, each.value) for each in study.trials] == [(each.parameters, each.score) for each in made]
        assert study.best_value == search.best.score
    with pytest.raises(QuellError, match="direction='maximize'"):
        Search(fixed, space, study=optuna.create_study())


def test_the_command_compares_and_plans():
    given = {"examples": 200, "batch-size": 20, "epochs": 2, "epsilon": 4, "delta": 1e-4, "trials": 4, "memory": 0}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))] + ["--sampling", "cyclic"]
    result = CliRunner().invoke(cli.app, ["tune", *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in (
        "➤ geometric",
        "truncated-poisson",
        "fixed",
        "The whole search: (4, 0.0001)-DP per example",
        "must stay secret",
    ):
        assert text in result.output
    found = json.loads(CliRunner().invoke(cli.app, ["tune", *options, "--json"]).output)
    assert documented.in_tables("tune") == [found.keys()]
    with pytest.raises(QuellError, match="must be a whole number"):
        raise CliRunner().invoke(cli.app, ["tune", *options, "--batch-size", "x"]).exception
