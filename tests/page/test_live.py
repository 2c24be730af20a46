"""The live page in a real browser: what it remembers, accepts, shows while it works, and can be told to stop."""

from __future__ import annotations

import threading

import pytest

from quell.progress import announce
from quell.serve import desk as live

from .accessibility import axe, violations

DONE = "document.getElementById('status')?.innerText === 'All mechanisms compared.'"


@pytest.fixture
def quick(monkeypatch):
    """Searches that find what previews find."""
    monkeypatch.setattr(live, "make_plan", lambda run, progress: live.draft_plan(run))


def test_the_state_is_in_the_address(browser, address, quick):
    browser.open(f"{address}?epsilon=3.3&examples=2k&batch_size=100&row=identity+(DP-SGD)+%7C+cyclic")
    browser.wait_for(DONE)
    assert "2,000 examples, batches of 100" in browser.run("document.getElementById('setup').innerText")
    assert browser.run("document.getElementById('value-epsilon').innerText") == "3.3"
    assert browser.run("document.getElementById('choice-title').innerText") == "Chosen: identity (DP-SGD)"
    asked = browser.run("location.search")
    browser.run("document.getElementById('control-epochs').focus()")
    browser.press("ArrowRight")
    browser.wait_for("location.search.includes('epochs=3')")
    assert browser.run("location.search") == asked.replace("epochs=2", "epochs=3")
    browser.wait_for(DONE)
    assert "δ = 10⁻⁵" in browser.run("document.querySelector('#more summary').innerText")  # the default, and said
    assert browser.complaints == []


def test_a_preset_sets_everything(browser, address, quick):
    browser.open(address)
    browser.run("(select => { select.value = 'BERT on SST-2'; select.dispatchEvent(new Event('change')) })"
                "(document.getElementById('control-preset'))")  # fmt: skip
    browser.wait_for("document.getElementById('setup').innerText.includes('batches of 1,024')")
    assert "67,349 examples" in browser.run("document.getElementById('setup').innerText")
    assert "optimizer=adam" in browser.run("location.search")


@pytest.fixture
def endless(monkeypatch):
    """A search that goes on until the page hangs up, or for a minute."""
    ended = threading.Event()

    def search(run, progress):
        try:
            progress(0, 1, "looking")
            for _ in range(6000):
                announce("iteration 5")
                threading.Event().wait(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(live, "make_plan", search)
    return ended


def test_a_search_shows_progress_and_can_be_stopped(browser, address, endless):
    browser.open(address)
    said = "Preview shown. Now looking: \\d+ s"
    browser.wait_for(f"/{said}/.test(document.getElementById('status').innerText)")
    assert browser.run("document.getElementById('preview').hidden") is False
    assert browser.run("document.querySelector('#working progress').value") > 0
    browser.run("document.querySelector('[data-action=stop]').click()")
    assert endless.wait(30)
    assert "Stopped" in browser.run("document.getElementById('status').innerText")
    assert browser.run("document.querySelector('[data-action=again]').hidden") is False


def test_the_sliders_stay_in_view(browser, address, quick):
    for width, share in ((1440, 0.2), (390, 0.25)):
        browser.look(width, 844)
        browser.open(address)
        browser.wait_for(DONE)
        browser.run("document.getElementById('privacy-title').scrollIntoView()")
        top, height = browser.run(
            "(({top, height}) => [top, height])(document.getElementById('sliders').getBoundingClientRect())"
        )
        assert top == 0
        assert height < share * 844


def test_a_row_is_certified_by_the_server(browser, address, monkeypatch, amplified):
    monkeypatch.setattr(live, "make_plan", lambda run, progress: amplified)
    browser.open(f"{address}?examples=100&batch_size=20&epochs=4&epsilon=4&delta=1e-3&sampling=cyclic")
    browser.wait_for(DONE)
    browser.run("choose(shown.mechanisms.findIndex(row => !row.certified))")
    browser.run("document.querySelector('[data-action=certify]').click()")
    browser.wait_for("shown.mechanisms.every(row => row.certified)")
    assert browser.run("document.querySelector('[data-action=download]') !== null")
    assert browser.complaints == []


@pytest.mark.skipif(axe() is None, reason="axe-core is missing: make test fetches it from npm")
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_wrong_with_the_live_page(browser, address, quick, width):
    browser.look(width, 900, dark=width == 390)
    browser.open(address)
    browser.wait_for(DONE)
    browser.run("document.getElementById('more').open = true")
    browser.type("control-delta", "much")
    browser.wait_for("document.querySelector('[aria-invalid]') !== null")
    assert violations(browser, axe()) == []
