"""The BISR paper's CIFAR-10 experiment: DP-SGD, BSR, BISR, BandMF and BandInvMF with four bands at (9, 1e-5)-DP.

    PYTHONPATH=src python experiments/cifar10.py DATA [--stages explore,main,paper] [--lanes 3] [--seconds 500]

Stages, each continuing where it stopped:
  paper    the paper's recipe (Table 1: clip 10 and its learning rates, PyTorch's initial weights), three seeds; all
           50,000 images with the real test set, and the paper's 40,000/10,000 split of the training set
  explore  initial weights, clip norm and learning rate for amplified BISR; judged on 10,000 held-out training images
  main     with those weights and that clip norm, the learning rate of every mechanism (also of what `quell plan` picks,
           and of DP-SGD and BandMF with the Poisson sampling that suits them best), judged on the same images; then
           every mechanism as tuned, on all 50,000 images and the real test set, three seeds
No choice ever looks at the test set. As in the papers, the choices themselves are not accounted for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from common import PLANS, RESULTS, Entry, Results, read_json
from plans import MORE, PAPER, PEERS, PLANNED, plan_name
from training import Job, lanes_of, read_cifar10, run_all

SEEDS = (1, 2, 3)
SMOKE = 975  # images with which an epoch has as many batches as planned
SAMPLINGS = ("balls_in_bins", "cyclic")
CLIPS = (1.0, 3.0, 10.0)
PACES = (0.7, 1.4, 2.8, 5.6)  # learning rate × the norm that gradients have after clipping, about min(clip, 4)
FACTORS = (0.25, 0.5, 1.0, 2.0)
_GUESSING = 20.0  # percent: twice what guessing gets
PAPER_RATES = {
    ("DP-SGD", "balls_in_bins"): 0.1,
    ("BSR p=4", "balls_in_bins"): 0.3,
    ("BISR p=4", "balls_in_bins"): 0.7,
    ("BandMF p=4", "balls_in_bins"): 0.3,
    ("BandInvMF p=4", "balls_in_bins"): 0.4,
    ("DP-SGD", "cyclic"): 0.1,
    ("BSR p=4", "cyclic"): 0.2,
    ("BISR p=4", "cyclic"): 0.7,
    ("BandMF p=4", "cyclic"): 0.2,
    ("BandInvMF p=4", "cyclic"): 0.5,
}


def paper_jobs() -> list[Job]:
    return [
        Job(plan_name(label, 9, sampling, size), size, 10.0, rate, False, seed)
        for size in ("full", "held-out")
        for (label, sampling), rate in PAPER_RATES.items()
        for seed in SEEDS
    ]


def explore_jobs() -> list[Job]:
    plan = plan_name("BISR p=4", 9, "balls_in_bins", "held-out")
    return [
        Job(plan, "held-out", clip, pace / min(clip, 4.0), he, 0)
        for he in (True, False)
        for clip in CLIPS
        for pace in PACES
    ]


Setting = tuple[str, float, str]  # label, ε, sampling
SETTINGS: list[Setting] = [
    *((label, 9.0, "balls_in_bins") for label in (PLANNED, *MORE)),
    *((label, 9.0, sampling) for sampling, choices in PEERS.items() for label in choices),
    *((label, 9.0, sampling) for sampling in SAMPLINGS for label in PAPER),
]
Trainer = Callable[[list[Job], Results], None]


def tune(
    explored: Entry,
    settings: Iterable[Setting],
    factors: Mapping[float, Sequence[float]],
    searches: Results,
    train: Trainer,
    bf16: bool = False,
    finer: bool = False,
) -> dict[Setting, Entry]:
    """For each setting the run that did best on held-out images, over multiples of the explored learning rate.

    The factors of its ε are tried first; while the best is the smallest so far, or no better than guessing, half of the
    smallest is tried too. `finer` then tries the two rates between the best and its neighbours.
    """

    def jobs(setting: Setting) -> list[Job]:
        plan, rate = plan_name(*setting, "held-out"), explored["rate"]
        return [Job(plan, "held-out", explored["clip"], rate * m, explored["he"], 0, bf16) for m in tried[setting]]

    tried = {setting: sorted(factors[setting[1]], reverse=True) for setting in settings}
    for _ in range(5):
        train([job for setting in tried for job in jobs(setting)], searches)
        best = {setting: best_of(searches, jobs(setting)) for setting in tried}
        for setting, run in best.items():
            if run["rate"] == explored["rate"] * tried[setting][-1] or run["accuracy"] < _GUESSING:
                tried[setting].append(tried[setting][-1] / 2)
    if finer:
        for setting, run in best.items():
            tried[setting] += [run["rate"] / explored["rate"] * step for step in (2**-0.5, 2**0.5)]
        train([job for setting in tried for job in jobs(setting)], searches)
        best = {setting: best_of(searches, jobs(setting)) for setting in tried}
    return best


def final_jobs(tuned: dict[Setting, Entry]) -> list[Job]:
    """Every setting as it was tuned, on the full data, with three seeds."""
    return [
        Job(plan_name(*setting, "full"), "full", run["clip"], run["rate"], run["he"], seed, run.get("bf16", False))
        for setting, run in tuned.items()
        for seed in SEEDS
    ]


def best_of(results: Results, jobs: list[Job]) -> Entry:
    """The most accurate of these runs, all of which judge on held-out images."""
    assert all(job.size == "held-out" for job in jobs)
    return max((results.runs[job.name] for job in jobs if job.name in results.runs), key=lambda run: run["accuracy"])


def arguments(description: str | None, stages: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--stages", default=stages)
    parser.add_argument("--lanes", type=int, default=3, help="runs at a time, each in a process of its own")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so many seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="two steps on little data, to try the script")
    return parser.parse_args()


def main() -> None:
    options = arguments(__doc__, "explore,main,paper")
    deadline = time.time() + options.seconds
    plans = read_json(PLANS / "cifar10.json")
    most = 1 if options.smoke else None
    searches, results = Results(options.results / "cifar10_tuning.json"), Results(options.results / "cifar10.json")
    with lanes_of(read_cifar10(options.data, SMOKE if options.smoke else None), options.lanes) as each:

        def train(jobs: list[Job], into: Results) -> None:
            if not run_all(jobs, plans, each, into, options.lanes, deadline, options.smoke):
                raise SystemExit(0)

        for stage in options.stages.split(","):
            print(f"-- {stage}", flush=True)
            if stage == "paper":
                train(paper_jobs()[:most], results)
            elif stage == "explore":
                train(explore_jobs()[:most], searches)
            else:
                explored = best_of(searches, explore_jobs())
                found = tune(explored, SETTINGS[:most], {9.0: FACTORS}, searches, train, finer=True)
                train(final_jobs(found), results)


if __name__ == "__main__":
    main()
