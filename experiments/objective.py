"""Which objective ranks mechanisms as training does? Rank correlations and regrets over all trained mechanisms.

    PYTHONPATH=src python experiments/objective.py

Reads the runs of `lambda_sweep.py`, `cifar10.py`, `imdb.py` and `small_tasks.py`, and writes `results/objective.json`.
In each group, one task at one ε, every objective recommends the mechanism with its least value; its regret is the
accuracy of the best mechanism of the group less that of the recommended one.

What is in-sample: `training` has one constant that was found on these runs, `JITTER`. So it is also chosen on the
groups of other ε or tasks, and judged on the one left out. Before, `training` was the geometric mean of the RMSE with
forgetting and that on prefix sums. The form of `loss` was settled after about 180 settings had been compared on the
runs that existed then; groups "trained later" hold only runs made after that. The small tasks were made after all of
this was settled.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from common import PLANS, RESULTS, Entry, read_json, strategy_of, write_json
from plans import CIFAR10, IMDB, PUBLISHED, SMALL_EXAMPLES, STUDIED, plan_name, small_lines
from scipy.stats import spearmanr

from quell import workload
from quell.analysis.error import error
from quell.analysis.landscape import Landscape
from quell.analysis.objective import FORGETTING, OBJECTIVES, Measured

PEERS = {"BandMF, cyclic Poisson": ("BandMF", "cyclic_poisson"), "DP-SGD, Poisson": ("DP-SGD", "poisson")}
EXPONENTS = (0.0, 1 / 36, 1 / 18, 1 / 9, 1 / 6, 1 / 4)  # that `JITTER` might have
BEFORE, FITTED = "training before", "training, fitted to the other groups"
SHOWN = ("training", BEFORE, "loss", "rmse")
BOOTSTRAPS = 300
FEWEST = 3  # mechanisms that make a group: the order of two is chance
FEWEST_OF_SMALL = 16  # the others were not finished
LATER, SETTLED = "trained later", "2026-11-16T16:20"


@dataclass(frozen=True)
class Trained:
    """A mechanism, its plan and the accuracies of its runs on all data."""

    label: str
    line: Entry
    accuracies: tuple[float, ...]
    rate: float
    examples: int | None = None  # where the steps do not tell

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def batch_size(self) -> int:
        if self.examples is not None:
            return self.examples // int(self.line["separation"])
        tasks = (CIFAR10, IMDB, PUBLISHED["scratch"][0])
        whole = {task.runs["full"][0]: task.examples for task in tasks}
        held_out = {task.runs["held-out"][0]: task.examples * 4 // 5 for task in tasks if "held-out" in task.runs}
        return (whole | held_out)[self.line["steps"]] // int(self.line["separation"])

    @cached_property
    def measured(self) -> Measured:
        line = self.line
        work = workload.sgd(line["steps"], line["momentum"], line["weight_decay"])
        return Measured(strategy_of(line), Landscape(work, line["separation"], self.batch_size), self.adaptive)

    @property
    def adaptive(self) -> bool:
        return bool(self.line.get("adaptive", False))

    @cached_property
    def errors(self) -> tuple[float, float, float]:
        """The RMSE with forgetting, that of single steps and that on prefix sums."""
        steps, own = self.line["steps"], self.measured.landscape.workload
        works = (workload.forgetting(own, FORGETTING * steps), workload.single_steps(steps), workload.prefix(steps))
        return tuple(self.line["noise_multiplier"] * error(self.measured.strategy, work).rmse for work in works)

    def score(self, objective: str) -> float:
        if objective == BEFORE:
            return math.sqrt(self.errors[0] * self.errors[2])
        return OBJECTIVES[objective].score(self.measured, float(self.line["noise_multiplier"]))

    def with_jitter(self, exponent: float) -> float:
        """`training` with another exponent; for adaptive optimizers it has none."""
        if self.adaptive:
            return self.score("training")
        return self.errors[0] * (self.errors[0] / self.errors[1]) ** exponent


Group = list[Trained]


def trained(
    file: str, keep: Callable[[Entry], bool] = lambda run: True, plan_file: str | None = None
) -> Iterator[Trained]:
    """The mechanisms of a result file with at least two runs over all data."""
    plans, runs = read_json(PLANS / f"{plan_file or file}.json"), defaultdict(list)
    for run in read_json(RESULTS / f"{file}.json")["runs"]:
        if (run.get("size") == "full" or run.get("held_out") is False) and keep(run):
            runs[plan_name(run["label"], run["epsilon"], run["sampling"], "full")].append(run)
    for name, mine in runs.items():
        if len(mine) > 1:
            yield Trained(plans[name]["label"], plans[name], tuple(run["accuracy"] for run in mine), mine[0]["rate"])


def tuned(plan_file: str, run_file: str) -> Iterator[Trained]:
    """The mechanisms of a search for learning rates, with the one run of the best rate."""
    plans, runs = read_json(PLANS / f"{plan_file}.json"), defaultdict(list)
    for run in read_json(RESULTS / f"{run_file}.json")["runs"]:
        if run.get("held_out", True):
            runs[run["plan"]].append(run)
    for name, mine in runs.items():
        best = max(mine, key=lambda run: run["accuracy"])
        yield Trained(plans[name]["label"], plans[name], (best["accuracy"],), best["rate"])


def through(task: str, recipe: str) -> Iterator[tuple[str, float, tuple[float, ...]]]:
    """The plans of `small_tasks.py` that are through, the rate that was chosen, and the accuracies over all data."""
    path, runs = RESULTS / f"small_{task}_{recipe}.json", defaultdict(list)
    for run in read_json(path)["runs"] if path.exists() else []:
        runs[run["plan"], run["size"]].append(run)
    for plan in dict.fromkeys(plan for plan, _ in runs):
        tried: dict[float, list[float]] = defaultdict(list)
        for run in runs[plan, "held-out"]:
            tried[run["rate"]].append(run["accuracy"])
        rate = max(tried, key=lambda rate: (len(tried[rate]), statistics.mean(tried[rate])))
        found = tuple(run["accuracy"] for run in runs[plan, "full"] if run["rate"] == rate)
        if len(found) == 3:
            yield plan, rate, found


def small(task: str, recipe: str) -> Iterator[Trained]:
    """The mechanisms of `small_tasks.py`."""
    lines = small_lines(recipe)
    for plan, rate, accuracies in through(task, recipe):
        line = lines[f"{plan} | full"]
        yield Trained(line["label"], line, accuracies, rate, SMALL_EXAMPLES[task])


def known(run: Entry) -> bool:
    """Whether a run existed when the form of `loss` was settled."""
    return "probe" in run["made"] or run["made"]["time"] < SETTLED


def all_groups() -> dict[str, Group]:
    """Every mechanism that was trained, by task, ε and what it was compared with."""
    found: dict[str, Group] = defaultdict(list)
    for file in ("predictors", "epsilons"):
        for each in trained(file, known):
            found[f"CIFAR-10, ε={each.line['epsilon']:g}"].append(each)
    for each in trained("epsilons", lambda run: not known(run)):
        found[f"CIFAR-10, ε={each.line['epsilon']:g}, {LATER}"].append(each)
    for each in tuned("epsilons", "epsilons_tuning"):
        if f"CIFAR-10, ε={each.line['epsilon']:g}, {LATER}" not in found:
            found[f"CIFAR-10, ε={each.line['epsilon']:g}, one run on held-out images"].append(each)
    for each in trained("published_scratch", plan_file="scratch"):
        found[f"ResNet-9, ε={each.line['epsilon']:g}"].append(each)
    for each in trained("lambda_sweep"):
        word = "amplified" if each.line["sampling"] == "balls_in_bins" else "fixed batches"
        found[f"λ, {word}, ε={each.line['epsilon']:g}"].append(each)
    found["BISR paper's, ε=9"] += trained("cifar10", lambda run: run["clip"] == 1.0)
    found["IMDB, ε=9"] += trained("imdb")
    for task, recipe in product(SMALL_EXAMPLES, STUDIED):
        for each in small(task, recipe):
            found[f"small: {task} by {recipe}, ε={each.line['epsilon']:g}"].append(each)
    names = sorted(found, key=lambda name: (name.startswith("small"), not name.startswith("CIFAR"), name))
    return {n: found[n] for n in names if len(found[n]) >= (FEWEST_OF_SMALL if n.startswith("small") else FEWEST)}


def spread(group: Group) -> float | None:
    """The standard error of a mean accuracy in a group, from the runs of all its mechanisms; None for single runs."""
    if any(len(each.accuracies) < 2 for each in group):
        return None
    variances = [statistics.variance(each.accuracies) for each in group]
    return math.sqrt(statistics.mean(variances) / statistics.mean(len(each.accuracies) for each in group))


def ranked(scores: Sequence[float], accuracies: Sequence[float]) -> float:
    if len(set(scores)) == 1 or len(set(accuracies)) == 1:
        return 0.0
    return float(spearmanr([-score for score in scores], accuracies).statistic)


def judged(group: Group, scores: Sequence[float]) -> Entry:
    """How well numbers rank a group: correlation, its bootstrap error over mechanisms and runs, and regret."""
    random, means = np.random.default_rng(20), [each.accuracy for each in group]
    again = []
    for _ in range(BOOTSTRAPS):
        drawn = random.integers(len(group), size=len(group))
        runs = [float(np.mean(random.choice(group[i].accuracies, len(group[i].accuracies)))) for i in drawn]
        again.append(ranked([scores[i] for i in drawn], runs))
    chosen = int(np.argmin(scores))
    return {
        "correlation": ranked(scores, means),
        "error": statistics.stdev(again),
        "recommended": f"{group[chosen].label}, {group[chosen].line['sampling']}",
        "accuracy": means[chosen],
        "regret": max(means) - means[chosen],
        "against_peers": {
            name: means[chosen] - max(peers)
            for name, (label, sampling) in PEERS.items()
            if (peers := [e.accuracy for e in group if e.label.startswith(label) and e.line["sampling"] == sampling])
        },
    }


def left_out(groups: dict[str, Group]) -> dict[str, Entry]:
    """Each group judged with the exponent that ranks all groups of other ε or tasks best."""
    scores = {(name, e): [each.with_jitter(e) for each in group] for name, group in groups.items() for e in EXPONENTS}
    found = {}
    for name, group in groups.items():
        rest = [other for other in groups if other.split(",")[:2] != name.split(",")[:2]]

        def others(exponent: float, rest: Sequence[str] = tuple(rest)) -> float:
            return statistics.mean(ranked(scores[o, exponent], [each.accuracy for each in groups[o]]) for o in rest)

        best = max(EXPONENTS, key=others)
        found[name] = judged(group, scores[name, best]) | {"exponent": best}
    return found


def learning_rates(groups: dict[str, Group], files: Sequence[str]) -> Entry:
    """How well the model picks a learning rate, told only the one that suits amplified DP-SGD at ε = 9."""
    known = next(e for e in groups["CIFAR-10, ε=9"] if e.label == "DP-SGD" and e.line["sampling"] == "balls_in_bins")
    unit = known.rate / known.measured.noise.best(known.line["noise_multiplier"])[1]
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for file in files:
        for run in read_json(RESULTS / f"{file}_tuning.json")["runs"]:
            runs[f"{file}: {plan_name(run['label'], run['epsilon'], run['sampling'], 'full')}"].append(
                (run["rate"], run["accuracy"])
            )
    plans = {file: read_json(PLANS / f"{file}.json") for file in files}
    lost, exact, usual, ratios = [], 0, [], []
    for name, tried in runs.items():
        file, plan = name.split(": ", 1)
        if len({rate for rate, _ in tried}) < 3:
            continue
        each = Trained("", plans[file][plan], (), 0.0)
        predicted = unit * each.measured.noise.best(each.line["noise_multiplier"])[1]
        accuracy = {rate: statistics.mean(a for r, a in tried if r == rate) for rate, _ in tried}
        best = max(accuracy, key=accuracy.__getitem__)
        picked = min(accuracy, key=lambda rate: abs(math.log(rate / predicted)))
        same = min(accuracy, key=lambda rate: abs(math.log(rate / known.rate)))
        exact += picked == best
        lost.append(accuracy[best] - accuracy[picked])
        usual.append(accuracy[best] - accuracy[same])
        ratios.append(abs(math.log2(predicted / best)))
    return {
        "mechanisms": len(lost),
        "picked_the_best": exact,
        "accuracy_lost": statistics.mean(lost),
        "most_accuracy_lost": max(lost),
        "accuracy_lost_with_the_rate_of_dpsgd": statistics.mean(usual),
        "within_a_factor_of_1.5": sum(ratio < math.log2(1.5) for ratio in ratios) / len(ratios),
        "within_a_factor_of_2": sum(ratio <= 1.0 for ratio in ratios) / len(ratios),
    }


def printed_rates(every: Sequence[Trained]) -> dict[str, Entry]:
    """How well the number does that plans print: the best rate as a multiple of Poisson DP-SGD's at the same ε."""
    peers = {e.line["epsilon"]: e for e in every if (e.label, e.line["sampling"]) == ("DP-SGD", "poisson")}
    off = defaultdict(list)
    for each in every:
        peer = peers.get(each.line["epsilon"], each)
        if each is not peer and each.line["sampling"] != "cyclic":
            one, other = (e.measured.best_rate(e.line["noise_multiplier"]) / e.rate for e in (each, peer))
            off[each.line["epsilon"]].append(math.log2(one / other))
    return {
        f"{epsilon:g}": {
            "mechanisms": len(found),
            "median_factor": 2 ** statistics.median(found),
            "within_a_factor_of_1.5": sum(abs(each) <= math.log2(1.5) for each in found),
            "within_a_factor_of_2": sum(abs(each) <= 1.0 for each in found),
        }
        for epsilon, found in sorted(off.items())
    }


def study() -> Entry:
    groups = all_groups()
    found: Entry = {"exponents": EXPONENTS, "groups": {}}
    for name, group in groups.items():
        found["groups"][name] = {
            "mechanisms": len(group),
            "standard_error": spread(group),
            "best": max(each.accuracy for each in group),
            "objectives": {o: judged(group, [each.score(o) for each in group]) for o in SHOWN},
        }
    for name, judgement in left_out(groups).items():
        found["groups"][name]["objectives"][FITTED] = judgement
    found["learning_rates"] = learning_rates(groups, ("predictors", "lambda_sweep"))
    found["later_learning_rates"] = learning_rates(groups, ("epsilons",))
    convnets = [*trained("epsilons"), *trained("predictors"), *trained("cifar10", lambda run: run["clip"] == 1.0)]
    found["printed_rates"] = printed_rates(convnets)
    found["small_printed_rates"] = {
        f"{task} by {recipe}": printed_rates([*small(task, recipe)])
        for task, recipe in product(SMALL_EXAMPLES, STUDIED)
    }
    return found


def main() -> None:
    found = study()
    write_json(RESULTS / "objective.json", found)
    for name, group in found["groups"].items():
        print(f"{name} ({group['mechanisms']} mechanisms, best {group['best']:.1f} ± {group['standard_error']})")
        for objective, j in group["objectives"].items():
            peers = ", ".join(f"{value:+.1f} against {peer}" for peer, value in j["against_peers"].items())
            print(
                f"  {objective:28s} {j['correlation']:5.2f} ± {j['error']:.2f}  regret {j['regret']:.1f}  "
                f"{j['recommended']}  {peers}"
            )
    for objective in (*SHOWN, FITTED):
        mine = [group["objectives"][objective] for group in found["groups"].values()]
        means = [statistics.mean(j[what] for j in mine) for what in ("correlation", "regret")]
        print(f"{objective:28s} mean correlation {means[0]:.3f}, mean regret {means[1]:.2f}")
    print(found["learning_rates"], found["later_learning_rates"], found["printed_rates"])


if __name__ == "__main__":
    main()
