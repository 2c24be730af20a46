"""Which correlation trains best? Accuracy against λ, and which computable number predicts accuracy.

    PYTHONPATH=src python experiments/lambda_sweep.py DATA [--stages predictors,lambda_sweep,epsilons] [--lanes 3]

predictors    sixteen mechanisms at (9, 1e-5) and (1, 1e-5), amplified: `predictors.json`
epsilons      sixteen mechanisms, peers with their own sampling among them, at five ε: `epsilons.json`
lambda_sweep  the λCGD paper's Figures 2 and 3 for CIFAR-10, at ε = 8 and 1, amplified and not: `lambda_sweep.json`

Every point has its learning rate chosen on held-out training images with one seed, and is then trained on all 50,000
with three. Initial weights, clip norm and the largest of the rates are those that `cifar10.py` explored. Both passes
run in bfloat16; gradients are clipped and summed in float32.
"""

from __future__ import annotations

import time

from cifar10 import SMOKE, Setting, arguments, best_of, explore_jobs, final_jobs, tune
from common import PLANS, RESULTS, Entry, Results, read_json
from plans import EPSILONS, LAMBDAS, STUDY, WIDE, plan_name
from training import Job, lanes_of, read_cifar10, run_all

FACTORS = {  # of the explored learning rate
    9.0: (0.25, 0.5, 1.0),
    8.0: (0.25, 0.5, 1.0),
    4.0: (0.25, 0.5, 1.0),
    2.0: (0.125, 0.25, 0.5),
    1.0: (0.0625, 0.125, 0.25),
    0.5: (0.03125, 0.0625, 0.125),
}
SETTINGS = {
    "predictors": [(label, epsilon, "balls_in_bins") for epsilon in (9.0, 1.0) for label in STUDY],
    "lambda_sweep": [
        (f"λCGD {value:g}", epsilon, sampling)
        for epsilon in (8.0, 1.0)
        for sampling in ("balls_in_bins", "cyclic")
        for value in LAMBDAS
    ],
    "epsilons": [
        (label, epsilon, sampling)
        for epsilon in EPSILONS
        for sampling, choices in WIDE.items()
        for label in choices
        if not (label in STUDY and sampling == "balls_in_bins" and epsilon in (9.0, 1.0))  # those are in "predictors"
    ],
}


def main() -> None:
    options = arguments(__doc__, "predictors,lambda_sweep")
    deadline = time.time() + options.seconds
    found = Results(options.results / "cifar10_tuning.json")
    if not found.runs:
        found = Results(RESULTS / "cifar10_tuning.json")
    explored = best_of(found, explore_jobs())
    with lanes_of(read_cifar10(options.data, SMOKE if options.smoke else None), options.lanes) as each:
        for stage in options.stages.split(","):
            plans = read_json(PLANS / f"{stage}.json")
            searches, results = (Results(options.results / f"{stage}{part}.json") for part in ("_tuning", ""))

            def train(jobs: list[Job], into: Results, plans: dict[str, Entry] = plans) -> None:
                if not run_all(jobs, plans, each, into, options.lanes, deadline, options.smoke):
                    raise SystemExit(0)

            print(f"-- {stage}", flush=True)
            settings = SETTINGS[stage][: 1 if options.smoke else None]
            for epsilon in dict.fromkeys(epsilon for _, epsilon, _ in settings):  # a killed script leaves some ε whole
                group = [setting for setting in settings if setting[1] == epsilon and not imported(setting, results)]
                train(final_jobs(tune(explored, group, FACTORS, searches, train, bf16=True)), results)


def imported(setting: Setting, results: Results) -> bool:
    """Whether its runs were made elsewhere, where the rate was chosen (the field `made` says so)."""
    runs = [run for run in results.runs.values() if run["plan"] == plan_name(*setting, "full")]
    return bool(runs) and all("probe" in run["made"] for run in runs)


if __name__ == "__main__":
    main()
