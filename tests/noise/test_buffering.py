"""The choice between drawing again and keeping agrees with what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quell.noise.buffering import BUFFERED, REGENERATED, worth_buffering

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = list(REGENERATED)


def _measured(device: str, noise: str, generator: str) -> float:
    """Milliseconds of the largest run in which this noise was measured."""
    text = (RESULTS / f"noise_{'gpu' if device == 'cuda' else 'cpu'}.md").read_text(encoding="utf-8")
    pattern = rf"\| {noise} \| {generator} \| ([\d.]+) \|" if device == "cuda" else rf"{noise} +{generator} +([\d.]+)"
    return float(re.findall(pattern, text)[-1])


@pytest.mark.parametrize(("device", "generator"), CASES)
@pytest.mark.parametrize("bands", [4, 16])
def test_the_choice_is_never_much_slower_than_the_other(device: str, generator: str, bands: int) -> None:
    again = _measured(device, f"BISR p={bands}", generator)
    kept = _measured(device, f"ring b={bands}", generator)  # as many buffers, read the same way
    buffered = worth_buffering(bands, device, generator, memory=bands - 1)
    assert (kept if buffered else again) <= 1.3 * min(kept, again)
    assert not worth_buffering(bands, device, generator, memory=bands - 2)


@pytest.mark.parametrize("case", CASES)
def test_costs_are_near_what_was_measured(case: tuple[str, str]) -> None:
    unit = _measured(case[0], "independent", case[1]) / REGENERATED[case].at(1)
    for bands in (4, 16):
        for line, noise in ((REGENERATED[case], "BISR p"), (BUFFERED[case], "ring b")):
            assert line.at(bands) * unit == pytest.approx(_measured(case[0], f"{noise}={bands}", case[1]), rel=0.4)


@pytest.mark.parametrize("case", CASES)
def test_independent_noise_keeps_nothing(case: tuple[str, str]) -> None:
    assert not worth_buffering(1, *case, memory=1e9)


def test_the_documented_costs_are_the_ones_used() -> None:
    page = (RESULTS.parents[1] / "docs" / "noise.md").read_text(encoding="utf-8")
    for title, lines in (("made again", REGENERATED), ("kept", BUFFERED)):
        cells = " | ".join(f"{lines[case].start:.2f} + {lines[case].each:.2f} (p−1)" for case in CASES)
        assert f"| {title} | {cells} |" in page
    least = [next(p for p in range(2, 99) if worth_buffering(p, *case, memory=99)) for case in CASES]
    assert f"| kept from, where memory allows | {' | '.join(f'p = {p}' for p in least)} |" in page
