"""An audit of the CIFAR-10 ConvNet at ε = 8: a lower bound on ε beside the promise, and what canaries cost in accuracy.

    python experiments/audit.py --data ../shared/data/cifar10 [--canaries 50000] [--seeds 2] [--smoke]

The run is that of cifar10.py, with BISR p=4 and balls-in-bins sampling, trained with canaries and without them. It
writes results/audit.json; docs/auditing.md shows it.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from common import HERE, seeded_key, write_json
from torch.nn import functional
from training import accuracy, convnet, data_sets, read_cifar10, sgd

from quell.planning import Plan, Prices
from quell.run import Run
from quell.torch import make_private

CLIP, RATE = 1.0, 5.6  # as cifar10.py chose them for this mechanism at ε = 9


def plan_of(examples: int, batch: int) -> Plan:
    promised = {"epsilon": 8.0, "delta": 1e-5, "momentum": 0.9, "weight_decay": 0.9999, "sampling": "balls_in_bins"}
    run = Run.from_data(examples=examples, batch_size=batch, epochs=10, **promised)
    return Plan(run, (Prices(run).price("bisr", bands=4),), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--canaries", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few images and steps, to try the script")
    options = parser.parse_args()
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
