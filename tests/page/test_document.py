"""What the page says, and that nothing in it can become markup or leave the machine."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from quell import cli
from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.planning.curves import page_content
from quell.planning.questions import answers
from quell.run import Run
from quell.show.page import reading
from quell.show.page.document import document
from quell.show.statement import privacy_statement

HOSTILE = '</script><script>alert(1)</script><!-- & "quoted" <img src=x onerror=alert(1)>'


class Reader(HTMLParser):
    """Elements, addresses, and the text inside each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))

    def handle_data(self, data):
        if self.inside and self.cdata_elem:
            tag, attributes, text = self.inside[-1]
            self.inside[-1] = (tag, attributes, text + data)


def brief(plan: Plan) -> dict:
    """What the live page gets."""
    return page_content(plan, answers(plan, thorough=False), thorough=False)


def data_of(html: str) -> dict:
    return next(json.loads(text) for _, attributes, text in Reader(html).inside if attributes.get("id") == "data")


def test_the_page_is_complete_in_itself(plan):
    reader = Reader(plan.page())
    assert reader.addresses == ["data:,"]
    assert reader.handlers == []
    assert reader.tags.count("script") == 2


def test_the_policy_names_exactly_the_inline_style_and_script(plan):
    made = document(plan.page_content)
    for tag, attributes, text in Reader(made.html).inside:
        if "type" not in attributes:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in made.policy
    assert "unsafe" not in made.policy
    assert "default-src 'none'" in made.policy
    assert "connect-src 'none'" in made.policy


def test_hostile_text_stays_text(plan):
    content = {**plan.page_content, "setup": HOSTILE}
    made = document(content, HOSTILE)
    assert Reader(made.html).tags.count("script") == 2
    assert "img" not in Reader(made.html).tags
    assert data_of(made.html)["plan"]["setup"] == HOSTILE
    block = next(text for _, attributes, text in Reader(made.html).inside if attributes.get("id") == "data")
    assert not set(block) & set("<>&")  # "</script " would end the block in a browser, "<!--" change its rules


def test_scripts_never_turn_text_into_markup():
    script = next(
        text for tag, attributes, text in Reader(document(None).html).inside if tag == "script" and not attributes
    )
    assert "textContent" in script
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def test_the_page_shows_the_plan(plan):
    shown = data_of(plan.page())["plan"]
    assert [row["family"] for row in shown["mechanisms"]] == [mechanism.name for mechanism in plan.alternatives]
    assert plan.alternatives[shown["recommended"]] is plan.mechanism
    assert shown["mechanisms"][shown["recommended"]]["rmse"] == plan.mechanism.rmse
    for row, mechanism in zip(shown["mechanisms"], plan.alternatives, strict=True):
        assert float(row["sigma"]) >= mechanism.noise_multiplier
        assert row["planned"]["sigma"] >= mechanism.noise_multiplier
        assert row["planned"]["epsilon"] >= mechanism.claim.epsilon


def test_nothing_beats_the_frontier_by_more_than_half_a_percent(plan):
    front = [plan.alternatives[index] for index in plan.page_content["frontier"]]
    assert [m.rmse for m in front] == sorted({m.rmse for m in front}, reverse=True)
    for mechanism in plan.alternatives:
        best = min(m.rmse for m in front if m.buffers <= mechanism.buffers)
        assert best * 0.995 <= mechanism.rmse


def test_the_statement_names_unit_neighbours_scheme_and_view(plan):
    text = " ".join(f"{title}: {text}" for title, text in privacy_statement(plan).items())
    for words in ("Each single example", "zero-out", "Scheme: cyclic", "Every noisy update", "ε = 4", "δ = 10⁻⁵"):
        assert words in text
    assert "in which batch" not in text


def test_a_promise_per_user_names_the_user_and_the_pattern():
    run = Run.from_data(examples=200, batch_size=10, epochs=2, epsilon=4.0, delta=1e-3, separation=7, participations=3)
    text = " ".join(privacy_statement(Plan(run, (Prices(run).price("identity"),), 0)).values())
    for words in ("any one user", "at most 3 steps", "at least 7 apart", "each user contributes", "Groups of users"):
        assert words in text
    assert "single example" not in text


def test_under_amplification_membership_is_secret_and_other_noise_only_estimated(amplified):
    text = " ".join(privacy_statement(amplified).values())
    assert "add-remove" in text
    assert "which examples were in which batch" in text
    rows = {row["family"]: row for row in amplified.page_content["mechanisms"]}
    assert rows["bisr"]["certified"] is True
    assert rows["bisr"]["epsilon"]["guaranteed"] is False
    assert all(row["epsilon"] is None for row in brief(amplified)["mechanisms"])


def test_a_mechanism_that_is_only_estimated_says_so(amplified):
    rows = {row["family"]: row for row in amplified.page_content["mechanisms"]}
    assert rows["identity"]["certified"] is False
    assert rows["identity"]["epsilon"] is None
    assert "not certified" in " ".join(rows["identity"]["details"])
    assert "Promise" not in " ".join(rows["identity"]["details"])


def test_dpsgd_is_an_estimate_only_under_amplification(plan, amplified):
    assert brief(plan)["baseline_estimated"] is False
    assert brief(amplified)["baseline_estimated"] is True


@pytest.mark.slow
def test_the_command_writes_the_page_and_the_pictures(tmp_path):
    report, picture = tmp_path / "report.html", tmp_path / "plan.svg"
    run = ["--examples", "200", "--batch-size", "20", "--epochs", "2", "--epsilon", "4", "--delta", "1e-3"]
    result = CliRunner().invoke(
        cli.app, ["plan", *run, "--sampling", "cyclic", "--html", str(report), "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert "Written:" in result.output
    assert data_of(report.read_text())["plan"]["steps"] == 20
    assert "<svg" in picture.read_text()[:1000]


def test_a_page_that_cannot_be_written_is_one_sentence(plan):
    with pytest.raises(QuellError, match="cannot write the page to /nowhere/"):
        plan.write_page("/nowhere/x.html")


def test_limits_show(plan):
    content = dataclasses.replace(plan, run=plan.run.changed(memory=0, draws=1)).page_content
    assert {row["family"] for row in content["mechanisms"] if row["fits"]} <= {"identity", "diagonal"}


def test_the_command_states_every_argument_of_a_run():
    """A new argument that the command left out would make another plan than the page shows."""
    stated = {"examples", "batch_size", "epochs", "epsilon", "delta", "time_limit"}  # a named mechanism needs no limit
    run = Run.from_data(examples=200, batch_size=20, epochs=2, epsilon=4.0, delta=1e-3, momentum=0.9, memory=None)
    assert set(run.arguments) == stated | set(reading._USUAL)
    text = reading.command(run, Prices(run.changed(sampling="cyclic")).price("identity"))
    assert text is not None
    assert "--epsilon 4 --delta 0.001 --momentum 0.9 --memory unlimited --mechanism 'identity (DP-SGD)'" in text
