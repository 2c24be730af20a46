"""Other pages than a plan's, in a real browser: a notebook with a plan in it, and the page of a log."""

from __future__ import annotations

import pytest

from quell.show.watching import watch_content, watch_page
from quell.watching import Log
from tests.test_watch import ABOUT, row

from .accessibility import axe, violations


def test_a_notebook_shows_the_same_page_in_its_frame(browser, plan, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><p>In [1]: plan</p>{plan._repr_html_()}")
    browser.open(path.as_uri())
    with browser.inside_the_frame():
        browser.wait_for("document.querySelectorAll('figure svg.chart').length > 3")
        assert "Use " in browser.run("document.getElementById('answer').innerText")
        with pytest.raises(RuntimeError, match="SecurityError"):
            browser.run("parent.document")  # the notebook is out of reach
    assert browser.complaints == []


def page_of_a_log(folder, norms):
    extra = {"clipped_share_not_private": 0.8, "median_norm_not_private": 2.0} if norms else {}
    rows = [row(step, **extra) for step in range(10, 400, 10)]
    content = watch_content("runs/1", {**ABOUT, "columns": Log("x", norms=norms).meanings}, rows)
    path = folder / "watch.html"
    path.write_text(watch_page(content, None))
    return path.as_uri()


@pytest.mark.skipif(axe() is None, reason="axe-core is missing: make test fetches it from npm")
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_wrong_with_the_page_of_a_log(browser, tmp_path, width):
    browser.look(width, 900, dark=width == 390)
    browser.open(page_of_a_log(tmp_path, norms=True))
    assert violations(browser, axe()) == []


@pytest.mark.parametrize(("norms", "charts"), [(False, 4), (True, 6)])
def test_the_page_of_a_log_shows_its_curves(browser, tmp_path, norms, charts):
    browser.open(page_of_a_log(tmp_path, norms))
    assert browser.run("document.querySelectorAll('figure:not([hidden]) svg.chart').length") == charts
    assert ("NOT PRIVATE" in browser.run("document.body.innerText")) == norms
    last = "getComputedStyle(document.querySelector('#cards li:last-child strong'), '::after').content"
    assert browser.run(last) == "none"  # the tick of a certified plan would be a lie here
    assert browser.complaints == []
