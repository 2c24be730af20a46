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

from quell import cli, page
from quell.errors import QuellError
from quell.page.content import content_of, privacy_statement
from quell.page.document import document
from quell.planning import Plan, problem_of
from quell.setup import Setup

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


def data_of(html: str) -> dict:
    return next(json.loads(text) for _, attributes, text in Reader(html).inside if attributes.get("id") == "data")


def test_the_page_is_complete_in_itself(plan):
    reader = Reader(page.render(plan))
    assert reader.addresses == ["data:,"]
    assert reader.handlers == []
    assert reader.tags.count("script") == 2


def test_the_policy_names_exactly_the_inline_style_and_script(plan):
    made = document(content_of(plan))
    for tag, attributes, text in Reader(made.html).inside:
        if "type" not in attributes:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in made.policy
    assert "unsafe" not in made.policy
    assert "default-src 'none'" in made.policy
    assert "connect-src 'none'" in made.policy


def test_hostile_text_stays_text(plan):
    content = {**content_of(plan), "setup": HOSTILE}
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
    shown = data_of(page.render(plan))["plan"]
    assert [row["family"] for row in shown["mechanisms"]] == [mechanism.name for mechanism in plan.mechanisms]
    assert shown["recommended"] == plan.recommended
    assert shown["mechanisms"][shown["recommended"]]["rmse"] == plan.mechanism.rmse
    for row, mechanism in zip(shown["mechanisms"], plan.mechanisms, strict=True):
        assert float(row["sigma"]) >= mechanism.noise_multiplier
        assert row["planned"]["sigma"] >= mechanism.noise_multiplier
        assert row["planned"]["epsilon"] >= mechanism.guarantee.epsilon


def test_the_frontier_is_what_nothing_beats(plan):
    def beaten(one):
        return any(
            (other.buffers, other.rmse) != (one.buffers, one.rmse)
            and other.buffers <= one.buffers
            and other.rmse <= one.rmse
            for other in plan.mechanisms
        )

    assert sorted(content_of(plan)["frontier"]) == [i for i, m in enumerate(plan.mechanisms) if not beaten(m)]


def test_the_statement_names_unit_neighbours_scheme_and_view(plan):
    text = " ".join(f"{part['title']}: {part['text']}" for part in privacy_statement(plan))
    for words in ("Each single example", "zero-out", "Scheme: cyclic", "Every noisy update", "ε = 4", "δ = 1e-05"):
        assert words in text
    assert "in which batch" not in text


def test_under_amplification_membership_is_secret_and_other_noise_only_estimated():
    setup = Setup(examples=100, batch_size=20, epochs=4, epsilon=4.0, delta=1e-3, sampling="balls_in_bins")
    plan = Plan(setup, (problem_of(setup).dpsgd, problem_of(setup).price("bisr", bands=2)), 1)
    text = " ".join(part["text"] for part in privacy_statement(plan))
    assert "add-remove" in text
    assert "which examples were in which batch" in text
    other, recommended = content_of(plan)["mechanisms"]
    assert other["epsilon"] is None
    assert recommended["epsilon"]["guaranteed"] is False
    assert all(row["epsilon"] is None for row in content_of(plan, with_estimates=False)["mechanisms"])


def test_the_command_writes_the_page_and_the_pictures(tmp_path):
    report, picture = tmp_path / "report.html", tmp_path / "plan.svg"
    run = ["--examples", "200", "--batch-size", "20", "--epochs", "2", "--epsilon", "4", "--delta", "1e-3"]
    result = CliRunner().invoke(cli.app, ["plan", *run, "--html", str(report), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "Written:" in result.output
    assert data_of(report.read_text())["plan"]["steps"] == 20
    assert "<svg" in picture.read_text()[:1000]


def test_a_page_that_cannot_be_written_is_one_sentence(plan):
    with pytest.raises(QuellError, match="cannot write the page to /nowhere/"):
        page.write(plan, "/nowhere/x.html")


def test_limits_show(plan):
    content = content_of(dataclasses.replace(plan, setup=dataclasses.replace(plan.setup, memory=0, draws=1)))
    assert {row["family"] for row in content["mechanisms"] if row["fits"]} <= {"identity", "diagonal"}
