"""The page in a real browser: it loads, it reacts, and the console stays silent."""

from __future__ import annotations

import pytest

import quell


def test_the_report_shows_four_pictures_and_the_table(report, plan):
    assert report.run("document.querySelectorAll('figure svg.chart').length") == 4
    assert report.run("document.querySelectorAll('#mechanisms tbody tr').length") == len(plan.alternatives)
    assert "Use " in report.run("document.getElementById('answer').innerText")
    assert report.run("document.getElementById('controls').hidden") is True
    assert report.run("document.querySelectorAll('path[d*=NaN], circle[cx=NaN], circle[cy=NaN]').length") == 0
    assert report.complaints == []


def test_a_run_of_one_step_is_drawn_too(browser, tmp_path):
    path = tmp_path / "report.html"
    quell.plan(examples=1, batch_size=1, epochs=1, epsilon=1, delta=0.01, sampling="cyclic").write_page(path)
    browser.open(path.as_uri())
    assert browser.run("document.querySelectorAll('figure svg.chart').length") == 4
    assert browser.run("/NaN|Infinity|undefined/.test(document.body.outerHTML.split('<script')[0])") is False
    assert browser.complaints == []


def test_pointing_at_a_curve_reads_it(report):
    report.run("document.querySelector('#error svg.chart').scrollIntoView()")
    box = report.run("(({x, y, width, height}) => [x + width / 2, y + height / 2])"
                     "(document.querySelector('#error svg.chart').getBoundingClientRect())")  # fmt: skip
    report.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    report.wait_for("/after step \\d+ the noise/.test(document.getElementById('error-readout').textContent)")


def test_the_keyboard_reads_curves_and_chooses_mechanisms(report):
    report.run("document.querySelector('#epsilon svg.chart').focus()")
    first = report.run("document.getElementById('epsilon-readout').textContent")
    report.press("ArrowDown")
    report.press("ArrowRight")
    assert report.run("document.getElementById('epsilon-readout').textContent") not in ("", first)

    report.run("document.querySelector('#mechanisms input:checked').focus()")
    before = report.run("document.getElementById('details').innerText")
    report.press("ArrowDown")
    report.wait_for(f"document.getElementById('details').innerText !== {before!r}")
    assert report.run("document.querySelectorAll('#error path.chosen').length") > 0
    assert report.complaints == []


def test_estimates_are_never_shown_as_guarantees(browser, pages):
    browser.open(pages["amplified"])
    title = "document.getElementById('epsilon-title').textContent"
    assert "estimated, not certified" in browser.run(title)  # of other noise with the recommended mechanism
    row = "[...document.querySelectorAll('#mechanisms tbody tr')].find(line => line.innerText.includes('identity'))"
    assert "estimated" in browser.run(f"{row}.innerText")
    assert "~" in browser.run(f"{row}.innerText")
    certified = "document.querySelector('#mechanisms tr.recommended').innerText"
    assert "~" in browser.run(certified)  # the gain compares it with DP-SGD, whose noise is estimated
    assert "DP-SGD, balls_in_bins batches (estimated)" in browser.run("document.getElementById('error').innerText")
    browser.run(f"{row}.querySelector('input').click()")
    assert "as planned (estimated, not certified)" in browser.run("document.getElementById('epsilon').innerText")
    browser.run("document.querySelector('#epsilon svg.chart').focus()")
    assert browser.run("document.getElementById('epsilon-readout').textContent").endswith("estimated, not certified")
    chosen = (
        "[...document.querySelectorAll('#epsilon .legend li')].filter(line => /identity|DP-SGD/.test(line.innerText))"
    )
    assert browser.run(f"{chosen}.length") > 1
    assert browser.run(f"{chosen}.some(line => line.innerText.includes('guarantee'))") is False


def test_everything_interactive_has_a_name(report):
    nameless = "[...document.querySelectorAll('input, select, svg[tabindex]')].filter(e => !(e.labels?.length || e.ariaLabelledByElements?.length)).length"  # noqa: E501
    assert report.run(nameless) == 0


@pytest.mark.slow
def test_moving_a_slider_moves_the_recommendation(browser, address):
    browser.open(address)
    browser.wait_for("document.body.dataset.kind === 'full'")
    full = browser.run("document.getElementById('answer').innerText")
    assert "ε = 8," in browser.run("document.getElementById('privacy').innerText")

    browser.run("document.getElementById('control-epsilon').focus()")
    browser.press("Home")  # a real key on a real slider: the smallest ε
    browser.wait_for("document.getElementById('setup').innerText.includes('(0.1,')"
                     " && document.getElementById('status').innerText === 'All mechanisms compared.'")  # fmt: skip
    private = browser.run("document.getElementById('answer').innerText")
    assert private != full
    assert "ε = 0.1," in browser.run("document.getElementById('privacy').innerText")
    assert browser.run("document.getElementById('control-epsilon').getAttribute('aria-valuetext')") == "0.1"

    browser.run("document.getElementById('control-memory').focus()")
    browser.press("Home")  # no memory at all: another mechanism
    browser.wait_for("/no extra memory/.test(document.getElementById('answer').innerText)"
                     " && document.getElementById('status').innerText === 'All mechanisms compared.'")  # fmt: skip
    assert browser.complaints == []


def test_a_refusal_is_shown_in_words(browser, address):
    browser.open(address)
    browser.wait_for("document.body.dataset.kind === 'full'")
    browser.type("control-examples", "5")
    browser.wait_for("document.getElementById('status').classList.contains('failed')")
    assert "larger than the data set" in browser.run("document.getElementById('status').innerText")
    assert browser.run("document.getElementById('plan').classList.contains('stale')") is True
    assert browser.run("document.querySelector('[aria-invalid]').name") == "batch_size"
    browser.type("control-examples", "many")
    browser.wait_for("document.querySelector('[aria-invalid]')?.name === 'examples'")
    assert "whole number" in browser.run("document.getElementById('fault-examples').innerText")
