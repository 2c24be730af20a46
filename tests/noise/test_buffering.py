"""The choice between drawing again and keeping agrees with what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quell.noise.buffering import BUFFERED, REGENERATED, WORTH_IT, draws_to_keep

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = list(REGENERATED)
MEASURED = [case for case in CASES if case[1] != "chacha8"]  # whose costs are derived


def _measured(device: str, noise: str, generator: str) -> float:
    """Milliseconds of the largest run in which this noise was measured."""
    text = (RESULTS / f"noise_{'gpu' if device == 'cuda' else 'cpu'}.md").read_text(encoding="utf-8")
    pattern = rf"\| {noise} \| {generator} \| ([\d.]+) \|" if device == "cuda" else rf"{noise} +{generator} +([\d.]+)"
    return float(re.findall(pattern, text)[-1])


@pytest.mark.parametrize(("device", "generator"), MEASURED)
@pytest.mark.parametrize("bands", [4, 16])
def test_the_choice_is_never_much_slower_than_the_other(device: str, generator: str, bands: int) -> None:
    again = _measured(device, f"BISR p={bands}", generator)
    kept = _measured(device, f"ring b={bands}", generator)  # as many buffers, read the same way
    buffered = draws_to_keep(bands, device, generator, memory=bands - 1)
    assert buffered in (0, bands - 1)
    assert (kept if buffered else again) <= 1.3 * min(kept, again)


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_kept_than_fits_and_only_if_it_saves_a_fifth(case: tuple[str, str]) -> None:
    remade, kept = REGENERATED[case], BUFFERED[case]
    for bands in (2, 5, 16, 40):
        for memory in (0, 0.9, 1, 3.5, 8, 15, 1000, float("inf")):
            keep = draws_to_keep(bands, *case, memory)
            most = min(bands - 1, memory // 1)
            saves = kept.at(most + 1) + (bands - 1 - most) * remade.each <= WORTH_IT * remade.at(bands)
            assert keep == (most if saves else 0) <= memory
    assert 0 < draws_to_keep(40, *case, 30) < 39  # a part


def test_derived_costs_of_chacha8_follow_their_rule() -> None:
    """On the GPU between Philox, as if it had no rounds, and ChaCha20 with 20; on the CPU below ChaCha20."""
    for lines in (REGENERATED, BUFFERED):
        none, few, many = (lines["cuda", name] for name in ("philox", "chacha8", "chacha20"))
        for a, b, c in zip(none, few, many, strict=True):
            assert b == pytest.approx(a + 8 / 20 * (c - a), abs=0.006)
        assert lines["cpu", "chacha8"].start < lines["cpu", "chacha20"].start
    assert REGENERATED["cpu", "chacha8"].each == pytest.approx(0.61 * REGENERATED["cpu", "chacha20"].each, abs=0.006)


@pytest.mark.parametrize("case", MEASURED)
def test_costs_are_near_what_was_measured(case: tuple[str, str]) -> None:
    unit = _measured(case[0], "independent", case[1]) / REGENERATED[case].at(1)
    for bands in (4, 16):
        for line, noise in ((REGENERATED[case], "BISR p"), (BUFFERED[case], "ring b")):
            assert line.at(bands) * unit == pytest.approx(_measured(case[0], f"{noise}={bands}", case[1]), rel=0.4)


@pytest.mark.parametrize("case", CASES)
def test_independent_noise_keeps_nothing(case: tuple[str, str]) -> None:
    assert draws_to_keep(1, *case, memory=1e9) == 0


def test_the_documented_costs_are_the_ones_used() -> None:
    page = (RESULTS.parents[1] / "docs" / "noise.md").read_text(encoding="utf-8")
    for title, lines in (("made again", REGENERATED), ("kept", BUFFERED)):
        cells = " | ".join(f"{lines[case].start:.2f} + {lines[case].each:.2f} (p−1)" for case in CASES)
        assert f"| {title} | {cells} |" in page
    least = [next(p for p in range(2, 99) if draws_to_keep(p, *case, memory=99)) for case in CASES]
    assert f"| kept from, where memory allows | {' | '.join(f'p = {p}' for p in least)} |" in page
