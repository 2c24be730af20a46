"""`make attack`: all attacks at full size; prints the table, writes it to attacks/results.md and README.md.

| run | does |
|---|---|
| `python -m attacks --write` | all of it: about 20 minutes on two cores |
| `python -m attacks kills noise` | some of them, at full size |
| `python -m attacks --share 0.01` | a small run of all |
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from attacks.outcome import Outcome

FULL = {"pricing": 2000, "plan_files": 20_000, "kills": 200, "clipping": 1500, "noise": 280, "audit": 40}
RESULTS = Path(__file__).parent / "results.md"
README = Path(__file__).parent.parent / "README.md"
_TITLE = "# Attacks\n\nWritten by `make attack`; what the rows mean: [README.md](README.md).\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attacks", description="Try to break Quell's promises.")
    parser.add_argument("names", nargs="*", help=f"which attacks: {', '.join(FULL)} (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of cases")
    parser.add_argument("--write", action="store_true", help="write the table to attacks/results.md and README.md")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(FULL)):
        parser.error(f"there is no attack {unknown[0]}: use {', '.join(FULL)}")
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers: many small matrices
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["QUELL_CACHE"] = cache
        for name in given.names or FULL:
            began = time.monotonic()
            count = max(1, round(FULL[name] * given.share))
            outcomes += import_module(f"attacks.{name}").attack(count, given.seed, given.workers)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(outcomes))
    for outcome in outcomes:
        for flaw in outcome.breaks:
            print(f"break in {outcome.attack}: {flaw}")
    if given.write:
        write(outcomes)
    return int(any(outcome.breaks for outcome in outcomes))


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    lines = ["| attack | tried | breaks | tightest ratio | |", "|---|---|---|---|---|"]
    for row in outcomes:
        ratio = "" if row.tightest is None else f"{row.tightest:.3f}"
        lines.append(f"| {row.attack} | {row.tried:,} | {len(row.breaks):,} | {ratio} | {row.note} |")
    return "\n".join(lines)


def write(outcomes: list[Outcome]) -> None:
    """The table to the results file, and to the README in place of the one it shows."""
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(committed(), table(outcomes)), encoding="utf-8")
    RESULTS.write_text(_TITLE + table(outcomes) + "\n", encoding="utf-8")


def committed() -> str:
    """The table in the results file."""
    return RESULTS.read_text(encoding="utf-8").removeprefix(_TITLE).rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
