"""The choice between drawing again and keeping agrees with what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quell.costs import DEVICES, KEPT, WORTH_IT, draws_to_keep, name_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = [(kind, generator) for kind in ("cuda", "cpu") for generator in ("chacha20", "chacha8", "philox")]
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
    remade, kept = DEVICES[name_of(*case)], KEPT[name_of(*case)]
    for bands in (2, 5, 16, 40):
        for memory in (0, 0.9, 1, 3.5, 8, 15, 1000, float("inf")):
            keep = draws_to_keep(bands, *case, memory)
            most = min(bands - 1, memory // 1)
            partly = kept.start + kept.each * most + remade.draw * (bands - 1 - most)
            saves = partly <= WORTH_IT * (remade.base + remade.draw * (bands - 1))
            assert keep == (most if saves else 0) <= memory
    assert 0 < draws_to_keep(40, *case, 30) < 39  # a part


@pytest.mark.parametrize("case", MEASURED)
def test_costs_are_near_what_was_measured(case: tuple[str, str]) -> None:
    remade, kept = DEVICES[name_of(*case)], KEPT[name_of(*case)]
    unit = _measured(case[0], "independent", case[1]) / remade.base
    for bands in (4, 16):
        again, ring = remade.of(0, bands), kept.start + kept.each * (bands - 1)
        for cost, noise in ((again, "BISR p"), (ring, "ring b")):
            assert cost * unit == pytest.approx(_measured(case[0], f"{noise}={bands}", case[1]), rel=0.4)


@pytest.mark.parametrize("case", CASES)
def test_independent_noise_keeps_nothing(case: tuple[str, str]) -> None:
    assert draws_to_keep(1, *case, memory=1e9) == 0


def test_the_documented_costs_are_the_ones_used() -> None:
    page = (RESULTS.parents[1] / "docs" / "noise.md").read_text(encoding="utf-8")
    names = [name_of(*case) for case in CASES]
    again = " | ".join(f"{DEVICES[name].base:.3g} + {DEVICES[name].draw:.3g} (p−1)" for name in names)
    kept = " | ".join(f"{KEPT[name].start:.3g} + {KEPT[name].each:.3g} (p−1)" for name in names)
    assert f"| made again | {again} |" in page
    assert f"| kept | {kept} |" in page
    least = [next(p for p in range(2, 99) if draws_to_keep(p, *case, memory=99)) for case in CASES]
    assert f"| kept from, where memory allows | {' | '.join(f'p = {p}' for p in least)} |" in page
