"""An audit of the CIFAR-10 ConvNet at ε = 8: a lower bound on ε beside the promise, and what canaries cost in accuracy.

    python experiments/audit.py --data ../shared/data/cifar10 [--canaries 50000] [--seeds 2] [--smoke]
    python experiments/audit.py --again

The run is that of cifar10.py, with BISR p=4 and balls-in-bins sampling, trained with canaries and without them. It
writes results/audit.json; docs/auditing.md shows it. `--again` audits the same runs once more, without data and without
training them: without the real gradients, what they released is canaries and noise, which their keys decide.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from common import HERE, read_json, seeded_key, write_json
from torch.nn import functional
from training import accuracy, convnet, data_sets, read_cifar10, sgd

from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch import make_private
from quell.torch.run import Portion, Unfinished

CLIP, RATE = 1.0, 5.6  # as cifar10.py chose them for this mechanism at ε = 9


def plan_of(examples: int, batch: int) -> Plan:
    promised = {"epsilon": 8.0, "delta": 1e-5, "momentum": 0.9, "weight_decay": 0.9999, "sampling": "balls_in_bins"}
    run = Run.from_data(examples=examples, batch_size=batch, epochs=10, **promised)
    return Plan(run, (Prices(run).price("bisr", bands=4),), 0)


def audit_again() -> None:
    """Replace the audits in the results by what today's audit says about the same runs."""
    found = read_json(HERE / "results" / "audit.json")
    plan = plan_of(50_000, 512)
    data = torch.utils.data.TensorDataset(torch.zeros(50_000, 1))
    for row in found["runs"]:
        if not row["canaries"]:
            continue
        model, key = convnet(row["seed"], he=False), seeded_key(f"audit {row['seed']} {row['canaries']}")
        own = {"key": key, "canaries": row["canaries"]}
        _, optimizer, _ = make_private(model, sgd(model, plan, RATE), data, plan, CLIP, **own)
        for step in range(plan.steps):
            sums = [torch.zeros_like(parameter) for parameter in optimizer.params]
            gathered = Unfinished(received=Portion(step, 0, 1, 0))
            optimizer.run.planted.plant(sums, gathered)
            optimizer.run.release(sums, gathered)
        row["audit"] = optimizer.audit().as_dict()
        print(row, flush=True)
        optimizer.close()
    write_json(HERE / "results" / "audit.json", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--canaries", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few images and steps, to try the script")
    parser.add_argument("--again", action="store_true", help="audit the runs in the results once more")
    options = parser.parse_args()
    if options.again:
        audit_again()
        return
    if options.data is None:
        parser.error("--data is needed, or --again")
    train, test = data_sets(read_cifar10(options.data, 1000 if options.smoke else None))["full"]
    plan = plan_of(len(train), 100 if options.smoke else 512)
    cuda, found = train.tensors[0].is_cuda, []
    for seed in range(1, 1 + options.seeds):
        for canaries in (0, min(options.canaries, len(train))):
            started, model = time.time(), convnet(seed, he=False).to(train.tensors[0].device)
            own = {"key": seeded_key(f"audit {seed} {canaries}"), "cuda_graphs": cuda, "canaries": canaries}
            model, optimizer, loader = make_private(model, sgd(model, plan, RATE), train, plan, CLIP, **own)
            for _ in range(plan.run.epochs):
                for x, y in islice(loader, 2 if options.smoke else None):
                    optimizer.zero_grad()
                    functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
            row = {"seed": seed, "canaries": canaries, "accuracy": accuracy(model, test)}
            if canaries and not options.smoke:
                audit = optimizer.audit()
                row["audit"] = audit.as_dict()
                print(audit, flush=True)
            optimizer.close()
            found.append({**row, "seconds": round(time.time() - started, 1)})
            print(found[-1]["accuracy"], found[-1]["seconds"], flush=True)
    if not options.smoke:
        device = torch.cuda.get_device_name() if cuda else "CPU"
        write_json(HERE / "results" / "audit.json", {"device": device, "plan": repr(plan.mechanism), "runs": found})


if __name__ == "__main__":
    main()
