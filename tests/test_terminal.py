"""What people read in a terminal: whole words at 80 and 120 columns, every sign explained, lines that can be pasted."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from quell import cli, planning
from quell.cli import plan as plan_command
from quell.cli import terminal
from quell.cli.help import EXAMPLES
from quell.errors import QuellError, read_count
from quell.planning import Plan, Prices, named_plan
from quell.planning.difference import differences
from quell.privacy.side_by_side import side_by_side
from quell.progress import listening
from quell.run import Run
from quell.show import bar, cards, words
from quell.show.differences import sentences
from tests.commands import DATA, PLAN, RUN, main, quell, remembered

WIDE = 1000


@pytest.fixture(scope="module", autouse=True)
def one_search_per_run():
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_command, "make_plan", remembered)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plan, and another row of its table."""
    folder = tmp_path_factory.mktemp("plans")
    quell(*PLAN, "--save", str(folder / "a.json"))
    quell("price", "blt d=1", *DATA, "--sampling", "cyclic", "--save", str(folder / "b.json"))
    return folder / "a.json", folder / "b.json"


COMMANDS = {
    "plan": PLAN,
    "explain": [*PLAN, "--explain"],
    "named": [*PLAN, "--mechanism", "lambda_cgd* λ=0.5"],
    "price": ["price", "bisr", "--bands", "16", *RUN],
    "compare": ["compare", "bisr", "--bands", "2,4,8", *RUN],
    "diff": ["diff", "a.json", "b.json"],
    "mechanisms": ["mechanisms"],
}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_too_long_and_no_word_is_broken(name, width, files, monkeypatch):
    monkeypatch.chdir(files[0].parent)
    text, whole = quell(*COMMANDS[name], columns=width), quell(*COMMANDS[name], columns=WIDE)
    pasted = [line for line in text.splitlines() if len(line) > width]
    assert pasted == []
    drawn = re.compile(r"[─━┏┳┓┃┡╇┩│└┴┘ ]+")
    broken = set(drawn.sub(" ", text).split()) - set(drawn.sub(" ", whole).split())
    assert broken == set()


def signs(text: str) -> tuple[set[str], set[str]]:
    """The columns, letters and marks in a table, and those that its legend explains."""
    lines = text.splitlines()
    head = next(index for index, line in enumerate(lines) if {"mechanism", "σ"} <= set(line.split()))
    end = next(index for index in range(head + 2, len(lines)) if not lines[index].strip())
    rows = lines[head + 2 : end]
    shown = set(lines[head].split()) - {"mechanism"}
    shown |= {letter for row in rows for letter in re.findall(r" (\w)=", row)}
    shown |= {mark for mark in "➤✗~" if any(mark in row for row in rows)}
    shown |= {"*"} if any("* " in row for row in rows) else set()
    below = " ".join(" ".join(lines[end:]).split())
    legend = re.split(r"The plan minimises|In papers|Sensitivity:|This noise|Use ", below)[0]
    return shown, {sign for sign in re.findall(r"(\S+): ", legend) if sign != "design"}


@pytest.mark.parametrize("width", [45, 80, 120])
@pytest.mark.parametrize("name", ["plan", "explain", "named", "price", "compare"])
def test_a_legend_explains_exactly_what_is_shown(name, width):
    shown, explained = signs(quell(*COMMANDS[name], columns=width))
    assert shown == explained
    assert len(shown) > 2


def test_the_recommendation_comes_first_and_reasons_when_asked():
    brief, long = quell(*PLAN), quell(*PLAN, "--explain")
    assert brief.splitlines()[0].startswith("Use ")
    assert "mechanism" not in brief.split("Proof")[0]
    assert "The best possible RMSE" not in brief
    assert "--explain" in brief
    assert "The best possible RMSE" in long
    assert "In papers" in long


def test_cards_say_what_the_plan_says(files):
    plan = Plan.load(files[0])
    noise, promise, cost, proof = cards.cards(plan, plan.answers)
    assert noise.value == f"{words.times(plan.prices.dpsgd.rmse / plan.mechanism.rmse)}× less"
    assert promise.value == "ε = 4, δ = 10⁻⁵"
    assert cost.value == words.copies(plan.mechanism.buffers)
    assert (proof.value, proof.note) == ("certified", words.certified_by(plan.mechanism.guarantee))


def test_one_noise_multiplier_is_written_one_way(files):
    plan = Plan.load(files[0])
    exact = plan.mechanism.noise_multiplier
    content = plan.page_content
    places = f"{quell(*PLAN, '--explain')} {plan.explain()} {json.dumps(content['privacy'])}"
    assert content["mechanisms"][content["recommended"]]["sigma"] == words.noise(exact)
    written = {number for number in re.findall(r"\d+\.\d+", places) if abs(float(number) - exact) < 2e-3}
    assert written == {words.noise(exact)}
    assert float(words.noise(exact)) >= exact


def test_a_default_delta_is_said():
    without = [each for each in PLAN if each not in ("--delta", "1e-5")]
    assert "δ = 10⁻⁵ is the default" in quell(*without)
    assert "is the default" not in quell(*PLAN)
    with pytest.raises(QuellError, match="price needs --delta as well"):
        quell("price", "identity", "--steps", "10", "--epochs", "2", "--epsilon", "1")


@pytest.mark.parametrize("text", ["2k", "2,000", "2_000", "2e3", "0.002M", "2000"])
def test_counts_are_read_as_people_write_them(text):
    assert read_count("examples", text) == 2000
    assert (
        json.loads(quell("price", "identity", *DATA, "--sampling", "cyclic", "--examples", text, "--json"))["run"][
            "examples"
        ]
        == 2000
    )


@pytest.mark.parametrize(
    "text", ["2q", "", "k", "1.5", "20,00", "nan", "inf", "1e999999999", "0", "-3", "9" * 500, "½"]
)
def test_what_is_no_count_is_refused(text):
    with pytest.raises(QuellError, match=r"examples=.* must be a whole number"):
        read_count("examples", text)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["plan"], ["--examples (or --users)", "--batch-size", "--epochs", "--epsilon"]),
        (["plan", "--users", "40"], ["--batch-size", "--epochs", "--epsilon"]),
        (["plan", "--steps", "40"], ["--examples (or --users)", "--epsilon"]),
        (["price"], ["a mechanism", "--epochs", "--epsilon", "--examples (or --users)", "--batch-size"]),
        (["compare", "blt", "--steps", "9"], ["--epochs", "--epsilon", "--delta"]),
        (["diff", "plan.json"], ["a second plan file"]),
        (["tune"], ["--examples", "--batch-size", "--epochs", "--epsilon"]),
        (["budget", "init", "x"], ["--name", "--epsilon", "--delta"]),
    ],
)
def test_all_that_is_missing_is_named_with_an_example(arguments, missing):
    with pytest.raises(QuellError) as caught:
        quell(*arguments)
    first, *example = str(caught.value).splitlines()
    assert f"needs {', '.join(missing)} as well; for example" in first
    assert "\n".join(line.strip() for line in example).startswith("quell ")


@pytest.mark.parametrize(
    "arguments", [["plan", "--epsilon", "x"], ["nonsense"], ["plan", "--bogus"], ["verify"], ["plan"]]
)
def test_errors_have_one_style_and_whole_words(arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, errors = main(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert errors.startswith("quell: ")
    assert all(len(line) <= 80 for line in errors.splitlines())
    assert "╭" not in errors


def test_a_path_in_an_error_stays_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/nowhere/" + "a-long-name/" * 9 + "plan.json"
    status, _, errors = main(monkeypatch, capsys, "verify", path)
    assert status == 2
    assert path in errors


OUTPUTS = [
    [*PLAN, "--html"],
    [*PLAN, "--save"],
    [*PLAN, "--plot"],
    ["price", "identity", *DATA, "--save"],
    ["compare", "bisr", "--bands", "2,4", *RUN, "--plot"],
]


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_files_that_cannot_be_written_are_refused_before_anything_is_computed(arguments, monkeypatch):
    def too_late(*_, **__):
        raise AssertionError("computed first")

    for name in ("build", "certify", "price"):
        monkeypatch.setattr(f"quell.planning.prices.Prices.{name}", too_late)
    monkeypatch.setattr(plan_command, "make_plan", too_late)
    with pytest.raises(QuellError, match="there is no folder /nonexistent"):
        quell(*arguments, "/nonexistent/x.png")


def every_command() -> list[list[str]]:
    found = {each.callback.__name__ for each in cli.app.registered_commands}
    return sorted([name] for name in found) + [["budget", name] for name in ("init", "add", "show", "verify")]


@pytest.mark.parametrize("command", [[], ["budget"], *every_command()])
def test_help_fits_80_columns_without_types_of_flags(command):
    text = quell(*command, "--help", columns=80)
    assert "<bool>" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "Examples" in text


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_in_help_can_be_pasted(command):
    """As they stand on the screen, backslashes included, they are the whole command."""
    lines = [line.strip() for line in quell(*command.split(), "--help", columns=80).splitlines()]
    for example in EXAMPLES[command]:
        wanted = [line.strip() for line in example.splitlines()]
        place = lines.index(wanted[0])
        assert lines[place : place + len(wanted)] == wanted
        assert all(line.endswith("\\") for line in wanted[:-1])
        program, *rest = shlex.split(example.replace("\\\n", " "))
        assert [program, *rest[: len(command.split())]] == ["quell", *command.split()]


def test_shells_complete_commands_mechanisms_and_schemes(monkeypatch, capsys):
    def completed(text: str) -> set[str]:
        monkeypatch.setenv("_QUELL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"quell {text}")
        monkeypatch.setenv("COMP_CWORD", str(len(text.split())))
        return set(main(monkeypatch, capsys)[1].split())

    assert completed("pl") == {"plan"}
    assert completed("price band_") == {"band_inv", "band_toeplitz"}
    assert completed("plan --sampling cy") == {"cyclic", "cyclic_poisson"}


def test_diff_says_what_differs(files):
    first, second = (Plan.load(path) for path in files)
    found = {each.name: each for each in differences(first, second)}
    assert found["rmse"].ratio == pytest.approx(second.mechanism.rmse / first.mechanism.rmse)
    assert (found["buffers"].first, found["buffers"].second) == (0, 1)
    assert not {"epsilon", "delta", "examples", "sampling"} & set(found)
    text = quell("diff", *map(str, files))
    assert "B keeps 1 model copy, and A no model copies." in text
    ratio = found["rmse"].ratio
    said = f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'} RMSE" if abs(1 - ratio) >= 0.005 else "as much RMSE"
    assert said in " ".join(text.split())
    assert "privacy" not in text
    content = json.loads(quell("diff", *map(str, files), "--json"))
    assert {each["name"] for each in content["differences"]} == set(found)
    assert "The two plans are the same" in quell("diff", str(files[0]), str(files[0]))


def test_diff_says_which_promise_is_stronger(files):
    plan = Plan.load(files[1])
    tighter = quell_plan(plan, epsilon=2.0)
    assert sentences(differences(plan, tighter))[0] == "B promises more privacy: ε = 2 instead of 4."
    assert sentences(differences(tighter, plan))[0] == "B promises less privacy: ε = 4 instead of 2."
    mixed = quell_plan(plan, epsilon=2.0, delta=1e-3)
    opposed = "B promises less in one way and more in the other: ε = 2 instead of 4 and δ = 0.001 instead of 10⁻⁵."
    assert sentences(differences(plan, mixed))[0] == opposed
    rates = [quell_plan(plan, learning_rates=[1.0] * 79 + [last]) for last in (0.5, 0.25)]
    assert "learning_rates" in {each.name for each in differences(*rates)}
    users = [quell_plan(plan, participations=most) for most in (2, 3)]
    assert {"participations", "noise_multiplier"} <= {each.name for each in differences(*users)}
    longer = quell_plan(plan, epochs=8)
    assert any("compared per example seen" in line for line in sentences(differences(plan, longer)))


def quell_plan(plan: Plan, **changes) -> Plan:
    return named_plan(plan.run.changed(**changes), "blt d=1")


def test_every_row_of_a_plan_can_be_named():
    data = {"examples": 2000, "batch_size": 100, "epochs": 4, "epsilon": 4.0, "delta": 1e-5}
    plan = remembered(Run.from_data(**data, sampling="cyclic", memory=0.0, draws=4))
    assert len(plan.alternatives) > 5
    for row in plan.alternatives:
        again = named_plan(plan.run, words.label(row))
        assert words.label(again.mechanism) == words.label(row)
        assert again.mechanism.noise_multiplier == pytest.approx(row.noise_multiplier, rel=1e-3)
        assert again.run.limits.fits(again.mechanism)


def test_price_and_plan_certify_the_same_mechanism(files):
    (priced,) = json.loads(quell("price", "blt", "--buffers", "1", *DATA, "--sampling", "cyclic", "--json"))[
        "mechanisms"
    ]
    named = json.loads(quell("plan", "--fast", *DATA, "--mechanism", "blt d=1", "--json"))
    saved = json.loads(files[1].read_text())
    assert [priced] == named["mechanisms"] == saved["mechanisms"]
    assert named["run"] == saved["run"]
    assert "claims hold" in quell("verify", str(files[1]))
    with pytest.raises(QuellError, match="bands is decided twice"):
        quell("price", "bisr p=2", "--bands", "4", *DATA)
    with pytest.raises(QuellError, match="give --examples and --batch-size instead of --steps"):
        quell("price", "identity", *RUN, "--save", "x.json")
    with pytest.raises(QuellError, match="does not go with --examples"):
        quell("price", "identity", *RUN, "--examples", "100")


def test_progress_names_every_stage_before_it_begins(monkeypatch):
    """A bar that stands at the end of the search while something else goes on is not honest."""
    heard: list[Any] = []
    certify = Prices.certify

    def watched(self, *arguments, **more):
        heard.append("certify")
        return certify(self, *arguments, **more)

    monkeypatch.setattr(Prices, "certify", watched)
    run = Run.from_data(examples=60, batch_size=10, epochs=2, epsilon=4, sampling="cyclic", memory=0, draws=1)
    plan = planning.make_plan(run, lambda done, total, what: heard.append((done, total, what)))
    certified = [index for index, each in enumerate(heard) if each == "certify"]
    assert len(certified) == len(plan.mechanisms)
    stages = [heard[index - 1] for index in certified]
    assert [(done, total) for done, total, _ in stages] == [(i, len(stages)) for i in range(len(stages))]
    assert all(what.startswith("certifying ") for _, _, what in stages)
    assert {what.split()[0] for _, _, what in heard[: certified[0] - 1]} == {"searching"}


def test_accounting_by_draws_announces_its_parts_and_can_be_ended():
    heard = []
    with listening(heard.append):
        assert side_by_side((abs, -number) for number in range(3)) == [0, 1, 2]
    assert heard == [f"accounting: part {part} of 3" for part in (1, 2, 3)]

    def enough(text):
        raise QuellError("enough")

    done = []
    with pytest.raises(QuellError, match="enough"), listening(enough):
        side_by_side((done.append, number) for number in range(10_000))
    assert len(done) < 10_000


def test_a_bar_of_one_piece_of_work_only_shows_that_it_goes_on(monkeypatch):
    bars = []

    class Bar(bar.Bar):
        def update(self, *arguments, **how):
            super().update(*arguments, **how)
            bars.append((self.tasks[0].completed, self.tasks[0].total, self.tasks[0].description))

    monkeypatch.setattr(bar, "Bar", Bar)
    with terminal.progress() as advance:
        advance(3, 7, "searching")
        advance(0, 1, "certifying")
        advance(1, 2, "writing")
    assert bars == [(3, 7, "searching"), (0, None, "certifying"), (1, 2, "writing")]


def test_commands_replace_what_they_wrote_and_nothing_else(tmp_path):
    """And what is refused is refused before the work."""
    row = ["price", "identity", *DATA, "--sampling", "cyclic", "--save"]
    swept = ["compare", "bisr", "--bands", "2,4", *RUN, "--plot"]
    plots = [(swept, f"a.{kind}") for kind in ("png", "svg", "pdf")]
    for command, name in [(row, "a.npz"), ([*PLAN, "--save"], "a.json"), ([*PLAN, "--html"], "a.html"), *plots]:
        path = tmp_path / name
        path.write_bytes(b"")  # as mktemp leaves it
        for _ in range(2):
            quell(*command, str(path))
        written = path.read_bytes()
        assert len(written) > 1000
        other = tmp_path / f"mine-{name}"
        other.write_bytes(b"mine")
        with pytest.raises(QuellError, match=f"cannot write .*mine-{name}: it exists and is not a .* of Quell"):
            quell(*command, str(other))
        assert other.read_bytes() == b"mine"
    with pytest.raises(QuellError, match="it exists and is not a page of Quell"):
        quell(*PLAN, "--html", str(tmp_path / "a.json"))
    with pytest.raises(QuellError, match="is a pipe or a device"):
        quell(*PLAN, "--save", "/dev/null")
