"""The page's cards, table, charts and actions in a real browser, on a desk and on a phone."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from typer.testing import CliRunner

from quell import cli
from quell.planning import Plan
from quell.show import words
from quell.show.page.document import assemble

from .accessibility import axe, violations

TICKS = """[...document.querySelectorAll('figure')].map(
  figure => ['x', 'y'].map(axis => figure.querySelectorAll(`.tick-${axis}`).length))"""


def text(browser, where):
    return browser.run(f"document.querySelector({json.dumps(where)}).innerText")


def middle(browser, where):
    """The middle of an element, in the window."""
    browser.run(f"document.querySelector({json.dumps(where)}).scrollIntoView({{block: 'center'}})")
    return browser.run("(({x, y, width, height}) => [x + width / 2, y + height / 2])"
                       f"(document.querySelector({json.dumps(where)}).getBoundingClientRect())")  # fmt: skip


def test_cards_come_first_and_reasons_under_why(report, plan):
    cards = report.run("[...document.querySelectorAll('#cards strong')].map(card => card.innerText)")
    assert re.fullmatch(r"[\d.]+× less", cards[0])
    assert cards[1] == "ε = 4, δ = 10⁻⁵"
    assert cards[2:] == [words.copies(plan.mechanism.buffers), "certified"]
    assert report.run("document.getElementById('why').open") is False
    assert report.run("document.querySelector('#scale svg').getAttribute('aria-label')").startswith("ε = 4 is")
    assert report.run("[...document.getElementById('reasons').children].map(p => p.textContent)") == [
        *words.explanation(plan, plan.answers)
    ]


def test_the_legend_explains_exactly_the_letters_that_are_shown(report, plan):
    labels = [words.label(mechanism) for mechanism in plan.alternatives]
    letters = {letter for label in labels for letter in re.findall(r" (\w+)=", label)}
    letters |= {"*"} if any("*" in label for label in labels) else set()
    explained = report.run("[...document.querySelectorAll('#legend dt')].map(letter => letter.textContent)")
    assert sorted(explained) == sorted(letters)
    assert {"p", "λ", "*"} <= letters


def test_every_heading_of_the_table_explains_itself(report):
    headings = report.run("[...document.querySelectorAll('#mechanisms th')].length")
    assert headings == report.run("document.querySelectorAll('#mechanisms th .term').length") == 10
    report.run("[...document.querySelectorAll('#mechanisms th .term')].find(term => term.innerText === 'σ').click()")
    assert text(report, "#explanation").startswith("Noise multiplier, the standard deviation")
    assert report.run("document.getElementById('explanation').matches(':popover-open')") is True


def test_the_table_is_sorted_by_the_column_that_says_so(report, plan):
    head = "document.querySelectorAll('#mechanisms th')"
    sorted_by = report.run(f"[...{head}].findIndex(cell => cell.ariaSort === 'ascending')")
    assert report.run(f"{head}[{sorted_by}].innerText").startswith("train")
    column = report.run(
        f"[...document.querySelectorAll('#mechanisms tbody tr')].map(row => row.cells[{sorted_by}].innerText)"
    )
    assert column == [words.amount(mechanism.score(plan.run.objective)) for mechanism in plan.alternatives]
    scores = [mechanism.score(plan.run.objective) for mechanism in plan.alternatives]
    assert scores == sorted(scores)


@pytest.mark.parametrize(
    "value", [0.0, 1.0, 2.27199, 37.005, 999.96, 12345.6, 9_999_999.0, 1.2346e8, 1e-4, 1.2346e-4, 0.00099, -0.5]
)
def test_numbers_look_the_same_in_charts_and_sentences(report, value):
    assert report.run(f"show({value!r})") == words.amount(value)


def test_sigma_is_one_number_everywhere(report, plan):
    sigma = report.run("shown.mechanisms[shown.recommended].sigma")
    assert f"noise multiplier {sigma}." in text(report, "#headline")
    assert f"noise multiplier {sigma}," in text(report, "#details")
    assert report.run("document.querySelector('#mechanisms tr.recommended').cells[1].innerText") == sigma
    report.run("document.querySelector('#epsilon svg.chart').focus()")
    report.press("ArrowDown")
    assert f"noise multiplier {sigma}:" in text(report, "#epsilon-readout")


def test_what_remains_of_noise_is_a_weight_and_never_a_share(report):
    report.run("document.querySelector('#cancellation svg.chart').focus()")
    report.press("End")
    assert "has weight" in text(report, "#cancellation-readout")
    assert "%" not in text(report, "#cancellation")


@pytest.mark.parametrize("name", ["plan", "amplified"])
def test_every_chart_has_ticks_whatever_is_chosen(browser, pages, name):
    browser.open(pages[name])
    for index in range(browser.run("shown.mechanisms.length")):
        browser.run(f"choose({index})")
        assert all(least >= 2 for ticks in browser.run(TICKS) for least in ticks), index
    assert browser.complaints == []


def test_the_error_against_epsilon_is_one_curve_with_the_plan_on_it(report, plan):
    assert report.run("document.querySelectorAll('#epsilon path.recommended.series').length") == 2  # curve and legend
    dot = report.run(
        "(dot => [dot.cx.baseVal.value, dot.cy.baseVal.value])(document.querySelector('#epsilon circle.recommended'))"
    )
    path = report.run("document.querySelector('#epsilon path.recommended').getAttribute('d')")
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]
    x, y = min(points, key=lambda point: abs(point[0] - dot[0]))
    assert (x, y) == pytest.approx(dot, abs=0.5)
    assert [a[1] for a in points] == sorted(a[1] for a in points)  # more ε, less error


def test_a_new_plan_leaves_the_focus_and_the_picked_row_where_they_were(report):
    report.run("document.querySelector('#mechanisms input[value=\"3\"]').focus()")
    report.run("choose(3)")
    picked = report.run("shown.mechanisms[3].label")
    report.run(
        "showPlan({...DATA.plan, mechanisms: DATA.plan.mechanisms.toReversed(), frontier: [0],"
        "recommended: DATA.plan.mechanisms.length - 1})"
    )
    assert picked in report.run("document.activeElement.closest('tr').innerText")
    assert picked in text(report, "#choice-title")
    report.run("showPlan({...DATA.plan, mechanisms: DATA.plan.mechanisms.toSpliced(3, 1), frontier: [0]})")
    assert report.run("chosen === shown.recommended")  # and not another row of its family
    report.run("document.querySelector('#pareto svg.chart').focus()")
    report.run("showPlan(DATA.plan)")
    assert report.run("document.activeElement.closest('figure').id") == "pareto"


@pytest.mark.parametrize("index", [0, 2])
def test_the_downloaded_plan_is_the_chosen_row(report, plan, tmp_path, index):
    report.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    report.run(f"choose({index})")
    report.run("document.querySelector('[data-action=download]').click()")
    report.wait_for("document.getElementById('said').innerText.includes('quell verify')")
    file = tmp_path / "plan.json"
    for _ in range(100):
        if file.exists():
            break
        report.run("new Promise(resolve => setTimeout(resolve, 50))")
    loaded = Plan.load(file)
    assert words.label(loaded.mechanism) == words.label(plan.alternatives[index])
    assert loaded.mechanism.noise_multiplier == plan.alternatives[index].noise_multiplier


def test_the_copied_command_makes_the_plan_of_the_row(report, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.run("choose(1)")
    program, *arguments = shlex.split(report.run("document.getElementById('copy-command').textContent"))
    assert program == "quell"
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert words.label(Plan.load("plan.json").mechanism) == words.label(plan.alternatives[1])


def test_copying_says_so(report):
    report.run("document.querySelector('[data-action=copy-python]').focus()")
    report.run("document.querySelector('[data-action=copy-python]').click()")
    report.wait_for("/Copied|Selected/.test(document.getElementById('said').innerText)")
    assert "make_private" in text(report, "#copy-python")


def test_an_estimated_row_has_a_command_and_no_file(browser, pages):
    browser.open(pages["amplified"])
    browser.run("choose(shown.mechanisms.findIndex(row => !row.certified))")
    assert browser.run("document.querySelector('[data-action=download]')") is None
    assert "Command that certifies this row" in text(browser, "#copies")
    assert "--mechanism 'identity (DP-SGD)' --save plan.json" in text(browser, "#copy-command")


def test_two_rows_stand_side_by_side(report, plan):
    report.run(
        "document.querySelector('[data-action=pin-A]').click(); choose(1);"
        "document.querySelector('[data-action=pin-B]').click()"
    )
    table = text(report, "#pairs")
    for mechanism in plan.alternatives[:2]:
        assert words.label(mechanism) in table
        assert words.amount(mechanism.rmse) in table
    ratio = round(
        100 * (plan.alternatives[1].score(plan.run.objective) / plan.alternatives[0].score(plan.run.objective) - 1)
    )
    assert f"{ratio}% higher" in table
    report.run("document.querySelector('[data-action=unpin-A]').click()")
    assert "B against A" not in text(report, "#pairs")


def test_no_column_is_cut_off_on_a_desk(report):
    report.look(1440, 900)
    for family in ("DejaVu Sans", "serif"):
        report.run(f"document.body.style.fontFamily = {family!r}")
        assert report.run("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))")


def test_a_phone_shows_numbers_and_reads_the_point_that_is_tapped(browser, pages):
    browser.look(390, 844)
    browser.open(pages["plan"])
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))")
    shown = "[...document.querySelector('#mechanisms tbody tr').cells].filter(cell => cell.offsetWidth).length"
    assert browser.run(shown) == 4  # mechanism, train, gain, memory
    x, y = middle(browser, "#error svg.chart")
    browser.tap(x, y)
    browser.wait_for("/after step \\d+/.test(document.getElementById('error-readout').textContent)")
    step = int(re.search(r"after step (\d+)", text(browser, "#error-readout"))[1])
    assert 20 < step < 60  # of 80
    assert browser.complaints == []


@pytest.mark.skipif(axe() is None, reason="axe-core is missing: make test fetches it from npm")
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_wrong(browser, pages, width, dark):
    browser.look(width, 900, dark)
    browser.open(pages["plan"])
    browser.run("document.getElementById('why').open = true; document.querySelector('[data-action=pin-A]').click();"
                "choose(3); document.querySelector('[data-action=pin-B]').click()")  # fmt: skip
    assert violations(browser, axe()) == []
    assert browser.complaints == []


@pytest.mark.skipif(axe() is None, reason="axe-core is missing: make test fetches it from npm")
@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_wrong_with_the_page_of_a_training(browser, plan, tmp_path, width):
    error = plan.page_content["mechanisms"][0]["error"]
    arm = {"mechanism": "bisr p=4", "batches": "cyclic", "sigma": "2.273", "rmse": "10.4", "noise": error}
    arm |= {"learning_rate": "0.5", "accuracy": "91.2%", "accuracies": [[0.8, 0.9]], "curve": [0.8, 0.9]}
    arms = [{**arm, "name": "DP-SGD", "kind": "dpsgd"}, {**arm, "name": "planned", "kind": "recommended"}]
    content = {
        "explained": {"The promise": "Almost the same."},
        "setup": "A run.",
        "verdict": "Better.",
        "promise": "(4, 10⁻⁵)-DP",
        "notes": ["A note."],
        "arms": arms,
    }
    path = tmp_path / "training.html"
    path.write_text(assemble("Quell training", "training.html", ("charts.js", "training.js"), content, "").html)
    browser.look(width, 900, dark=width == 390)
    browser.open(path.as_uri())
    assert browser.run("document.querySelectorAll('figure svg.chart').length") == 2
    assert browser.run("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('.scroll'))")  # accuracy too
    assert violations(browser, axe()) == []
    assert browser.complaints == []
