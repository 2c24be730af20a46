"""The budget file: who is charged, who is refused, and what crashes, crowds and damage leave of it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import quell
from quell import cli
from quell.budget import Budget, Entry, lines
from quell.budget.claims import Claim, claim_again, run_claim, search_claim
from quell.budget.entry import checks_of, entry_of
from quell.budget.ledger import spent
from quell.errors import QuellError
from quell.noise import Key
from quell.noise.stream import UnrecordedKeyWarning
from quell.privacy import gaussian_epsilon
from quell.privacy.profile import PointProfile, plain
from tests import documented

SMALL = {"examples": 200, "batch_size": 20, "epochs": 2, "delta": 1e-5}


@pytest.fixture(scope="module")
def plan():
    return quell.plan(epsilon=2.0, sampling="cyclic", memory=0, draws=1, **SMALL)


@pytest.fixture(scope="module")
def entry(plan):
    return entry_of(run_claim(plan.prices, plan.mechanism), "a")


@pytest.fixture
def budget(tmp_path):
    return Budget.create(tmp_path / "b", name="patients", epsilon=4.0, delta=1e-5)


def named(entry: Entry, run: str) -> Entry:
    return dataclasses.replace(entry, run=run)


def test_runs_are_charged_until_the_budget_is_spent(budget, plan):
    for number in range(3):
        assert budget.charge(plan, run=f"run {number}")
    mu = dict(budget.entries[0].profile)["mu"]
    exact = gaussian_epsilon(1 / (mu * 3**0.5), 1e-5)
    found = budget.spent()
    assert exact <= found.epsilon <= exact * 1.0001
    assert (found.runs, found.naive_epsilon, found.naive_delta) == (3, 6.0, pytest.approx(3e-5))
    with pytest.raises(QuellError, match=r"does not suffice: 3 runs spent ε = 3\.\d+, and with this one .* 4\.\d+"):
        budget.charge(plan, run="run 3")
    assert budget.spent() == found
    assert [check.holds for check in budget.verify()] == [True] * 16


def test_a_plan_as_large_as_the_budget_fits_alone(tmp_path, plan):
    own = Budget.create(tmp_path / "own", name="x", epsilon=2.0, delta=1e-5)
    assert own.charge(plan, run="a")
    with pytest.raises(QuellError, match="does not suffice"):
        own.charge(plan, run="b")


def test_a_run_is_charged_once_whatever_resumes_it(budget, plan, entry, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert budget.add(entry)
    assert not budget.add(entry)
    assert not budget.charge(quell.Plan.load(tmp_path / "plan.json"), run="a")
    other = quell.plan(epsilon=1.0, sampling="cyclic", memory=0, draws=1, **SMALL)
    assert budget.charge(other, run="a")  # another plan under the same name is another run
    assert budget.spent().runs == 2


@pytest.mark.slow
def test_random_batches_are_charged_by_what_is_certified(budget):
    random = quell.plan(epsilon=1.0, sampling="poisson", memory=0, **SMALL)
    assert budget.charge(random, run="a")
    assert budget.charge(random, run="b")
    found = budget.spent()
    assert 1.0 < found.epsilon <= found.adaptive_epsilon
    assert found.epsilon < found.naive_epsilon
    assert all(check.holds for check in budget.verify())


def test_fixed_plans_are_charged_less(tmp_path):
    random = quell.plan(epsilon=1.0, sampling="poisson", memory=0, **SMALL)
    total = spent([entry_of(run_claim(random.prices, random.mechanism), "a")] * 2, 1e-5)
    between = 0.5 * (total.epsilon + total.adaptive_epsilon)
    made = [
        Budget.create(tmp_path / f"{fixed}", name="x", epsilon=between, delta=1e-5, fixed_plans=fixed)
        for fixed in (True, False)
    ]
    for each in made:
        each.charge(random, run="a")
    made[0].charge(random, run="b")
    with pytest.raises(QuellError, match="does not suffice"):
        made[1].charge(random, run="b")


def test_users_are_not_protected_by_promises_per_example(tmp_path, entry):
    public = "user with public ownership of examples"
    users, owners, examples = (
        Budget.create(tmp_path / unit, name="x", epsilon=8.0, delta=1e-5, unit=unit)
        for unit in ("user", public, "example")
    )
    per_user, per_owner = (dataclasses.replace(entry, unit=unit) for unit in ("user", public))
    for budget, weaker in ((users, entry), (users, per_owner), (owners, entry)):
        with pytest.raises(
            QuellError, match=rf"is per {budget.allowed.unit}, but the run is private per {weaker.unit}"
        ):
            budget.add(weaker)
    assert users.add(per_user)
    assert owners.add(per_owner)
    assert owners.spent() == users.spent()
    assert owners.add(named(per_user, "b"))
    assert examples.add(per_user)


def test_points_that_charge_more_than_is_known_today_are_true(monkeypatch, entry):
    """Bounds without draws made the points of balls in bins smaller; those of older entries stay."""
    known = PointProfile(((0.0, 0.1), (1.0, 1e-3)), 1e-7)
    claim = Claim(entry.unit, entry.epsilon, entry.delta, known, {})
    monkeypatch.setattr("quell.budget.entry.claim_again", lambda content: claim)
    for points, failure, holds in (
        (((0.0, 0.1), (1.0, 1e-3)), 1e-7, True),
        (((0.0, 0.1), (1.0, 2e-3)), 2e-7, True),
        (((0.0, 0.2), (1.0, 9e-4)), 1e-7, False),
        (((0.0, 0.2), (1.0, 2e-3)), 0.0, False),
        (((0.0, 0.2), (1.1, 2e-3)), 1e-7, False),
        (((0.0, 0.2),), 1e-7, False),
    ):
        stated = dataclasses.replace(entry, profile=plain(PointProfile(points, failure)))
        assert [check.holds for check in checks_of(stated, {})] == [True] * 4 + [holds]


def test_a_search_has_one_unit(plan):
    """Its claim is for users only if every trial's is."""
    per_user = quell.plan(users=200, batch_size=20, epochs=2, delta=1e-5, epsilon=2.0, sampling="cyclic", memory=0)
    kinds = [(each.prices, each.mechanism) for each in (per_user, plan)]
    assert search_claim(2, kinds[:1], 1e-5).unit == "user"
    content = search_claim(2, kinds[1:], 1e-5).content
    forged = {**content, "plans": [*search_claim(2, kinds[:1], 1e-5).content["plans"], *content["plans"]]}
    with pytest.raises(QuellError, match="promise privacy per user and per example"):
        claim_again(forged)


def test_a_row_of_a_user_that_changes_counts_twice(tmp_path, entry):
    """Hidden is whether a user is there. The clipped mean of two rows turns around where one of them is zeroed."""
    rows = np.array([1000.0, -10.0])
    units = [float(np.clip(each.mean(), -1, 1)) for each in (rows, rows * [0, 1])]
    assert abs(units[0] - units[1]) == 2  # two clip norms, where a user that is absent moves one
    examples = Budget.create(tmp_path / "b", name="x", epsilon=8.0, delta=1e-5)
    examples.add(dataclasses.replace(entry, unit="user"))
    exact = gaussian_epsilon(1 / (2 * entry.profile["mu"]), 1e-5)
    assert exact <= examples.spent().epsilon <= exact * (1 + 1e-6)
    assert examples.spent().naive_epsilon == 2 * entry.epsilon


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"epsilon": 1.0}, "epsilon"),
        ({"digest": "0" * 64}, "digest"),
        ({"unit": "user"}, "unit"),
        ({"profile": {"kind": "gaussian", "mu": 0.1, "failure": 0.0}}, "privacy loss"),
    ],
)
def test_every_false_claim_is_found(tmp_path, entry, change, claim):
    budget = Budget.create(tmp_path / "b", name="x", epsilon=8.0, delta=1e-5)
    budget.add(dataclasses.replace(entry, **change))
    (false,) = [check for check in budget.verify() if not check.holds]
    assert claim in false.claim


def test_noise_below_the_promise_is_found(budget, entry):
    plan = json.loads(json.dumps(entry.plan))
    plan["mechanism"]["noise"]["multiplier"] *= 0.9
    budget.add(dataclasses.replace(entry, plan=plan))
    assert any("is not certified" in str(check.recomputed) for check in budget.verify())


def test_plans_too_large_to_carry_are_checked_by_digest(budget, entry, plan):
    budget.add(dataclasses.replace(entry, plan=None))
    assert not all(check.holds for check in budget.verify())
    assert all(check.holds for check in budget.verify([plan]))


def test_a_torn_last_line_counts_for_nothing_and_is_replaced(budget, entry):
    budget.add(entry)
    whole = budget.path.read_bytes()
    budget.add(named(entry, "b"))
    text = budget.path.read_bytes()
    for cut in (2, 40, len(text) - len(whole) - 1):
        budget.path.write_bytes(text[: len(text) - cut])
        assert [each.run for each in budget.entries] == ["a"]
        assert budget.add(named(entry, "b"))
        assert budget.path.read_bytes() == text
    budget.path.write_bytes(text[:-1])  # the line is whole, and its writer may have been answered: it counts
    assert not budget.add(named(entry, "b"))
    assert budget.add(named(entry, "c"))
    assert [each.run for each in budget.entries] == ["a", "b", "c"]


def test_damage_before_the_end_is_refused(budget, entry):
    budget.add(entry)
    budget.add(named(entry, "b"))
    text = budget.path.read_bytes()
    first, second, third = text.splitlines(keepends=True)
    for place in (*range(0, len(text), 37), len(text) - 1):
        changed = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        budget.path.write_bytes(changed)
        with pytest.raises(QuellError, match=r"is damaged|is not a budget"):
            budget.add(named(entry, "c"))
        assert budget.path.read_bytes() == changed
    for shuffled in (first + third + second, second + third, first + third, first + second + second + third):
        budget.path.write_bytes(shuffled)
        with pytest.raises(QuellError, match="is damaged"):
            Budget(budget.path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]\n", b'{"check":1}\n', b"\xff\n", b'{"format":"quell-plan"}\n'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(QuellError, match=r"is damaged|is not a budget"):
        Budget(tmp_path / "x")
    with pytest.raises(QuellError, match="exists already"):
        Budget.create(tmp_path / "x", name="x", epsilon=1.0, delta=1e-5)
    with pytest.raises(QuellError, match="cannot read the budget"):
        Budget(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content", [b'{\n  "format": "quell-plan",\n  "version": 3\n}\n', b'{"a": 1}\n{}\n', b"a,b\n1,2\n"]
)
def test_a_file_whose_first_line_is_no_budgets_is_not_called_damaged(tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(QuellError, match=r"plan\.json is not a budget: quell budget init makes one"):
        Budget(tmp_path / "plan.json")


def test_a_budget_whose_first_line_is_damaged_is_not_called_another_file(budget):
    text = budget.path.read_bytes()
    budget.path.write_bytes(text.replace(b"quell", b"quill"))
    with pytest.raises(QuellError, match=r"line 1 of the budget .* is damaged: restore the file from a copy"):
        Budget(budget.path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "must be positive"),
        ({"delta": 1.0}, "between 0 and 1"),
        ({"unit": "house"}, "use example, user with public ownership of examples, user"),
        ({"name": "a\nb"}, "a line of text"),
        ({"fixed_plans": 1}, "True or False"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(QuellError, match=words):
        Budget.create(tmp_path / "x", **{"name": "x", "epsilon": 1.0, "delta": 1e-5, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_charges_nothing(budget, entry, monkeypatch):
    budget.add(entry)
    before, write = budget.path.read_bytes(), os.write
    monkeypatch.setattr(lines.os, "write", lambda handle, text: write(handle, text[:50]))
    with pytest.raises(QuellError, match="nothing was charged"):
        budget.add(named(entry, "b"))
    assert budget.path.read_bytes() == before


def test_a_charge_is_on_the_disk_before_it_is_answered(budget, entry, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(lines.os, "fsync", lambda handle: (fsync(handle), synced.append(os.fstat(handle).st_size)))
    budget.add(entry)
    assert synced == [budget.path.stat().st_size]


@pytest.mark.parametrize("moment", ["flock", "fsync"])
def test_a_charge_to_a_file_that_was_replaced_meanwhile_is_no_charge(budget, entry, monkeypatch, moment):
    """Somebody puts a copy in its place: the line would be in a file that has no name any more."""
    room = lines.fcntl if moment == "flock" else lines.os
    act = getattr(room, moment)

    def replace(*arguments):
        act(*arguments)
        copy = budget.path.with_name("copy")
        copy.write_bytes(budget.path.read_bytes().splitlines(keepends=True)[0])
        copy.replace(budget.path)

    monkeypatch.setattr(room, moment, replace)
    with pytest.raises(QuellError, match="was replaced while it was used: try again"):
        budget.add(entry)
    assert budget.entries == []


def _charge_many(path: Path, entry: Entry, writer: int, count: int, gate) -> None:
    gate.wait()
    own = Budget(path)
    for number in range(count):
        own.add(named(entry, f"{writer}.{number}"))


@pytest.fixture(scope="module")
def cheap(entry):
    """A run that a budget has room for hundreds of."""
    return dataclasses.replace(entry, profile={"kind": "gaussian", "mu": 1e-3, "failure": 0.0}, plan=None)


def test_crowds_of_writers_lose_nothing(budget, cheap):
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(4)
    crowd = [context.Process(target=_charge_many, args=(budget.path, cheap, w, 12, gate)) for w in range(4)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert sorted(each.run for each in budget.entries) == sorted(f"{w}.{n}" for w in range(4) for n in range(12))


def test_crowds_never_spend_more_than_the_budget(tmp_path, entry):
    """Room for three of these runs, asked for by four writers of which each wants two."""
    own = Budget.create(tmp_path / "b", name="x", epsilon=4.0, delta=1e-5)
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(4)
    crowd = [context.Process(target=_until_refused, args=(own.path, entry, w, gate)) for w in range(4)]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    assert own.spent().runs == 3


def _until_refused(path: Path, entry: Entry, writer: int, gate) -> None:
    gate.wait()
    for number in range(2):
        try:
            Budget(path).add(named(entry, f"{writer}.{number}"))
        except QuellError:
            return


def _charge_and_tell(path: Path, entry: Entry, pipe) -> None:
    own = Budget(path)
    for number in range(10_000):
        own.add(named(entry, f"{number}"))
        pipe.send(number)


def test_what_was_answered_survives_kill_9(budget, cheap):
    """Writers that are killed at any moment leave a file that opens, and every charge that they were told of."""
    context = multiprocessing.get_context("fork")
    told = -1
    for pause in (0.05, 0.12, 0.2):
        receiver, sender = context.Pipe(duplex=False)
        writer = context.Process(target=_charge_and_tell, args=(budget.path, cheap, sender))
        writer.start()
        sender.close()
        receiver.poll(10)
        time.sleep(pause)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        try:
            while True:
                told = max(told, receiver.recv())
        except EOFError:
            pass
        kept = {each.run for each in budget.entries}
        assert kept >= {f"{number}" for number in range(told + 1)}
        assert len(kept) <= told + 2


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["budget", *arguments], env={"COLUMNS": "200"})
    if isinstance(result.exception, QuellError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_does_the_same(tmp_path, plan):
    file, saved = str(tmp_path / "b"), str(tmp_path / "plan.json")
    plan.save(saved)
    assert "ε = 4 at δ = 10⁻⁵ per example" in run("init", file, "--name", "p", "--epsilon", "4", "--delta", "1e-5")
    assert "Nothing is charged" in run("show", file)
    assert "Charged. 1 run so far" in run("add", file, saved, "--run", "a")
    assert "was charged before" in run("add", file, saved, "--run", "a")
    run("add", file, saved)
    shown = json.loads(run("show", file, "--json"))
    assert shown["spent"] | {"epsilon": 0, "adaptive_epsilon": 0, "counted": 0} == {
        "runs": 2,
        "delta": 1e-5,
        "epsilon": 0,
        "adaptive_epsilon": 0,
        "naive_epsilon": 4.0,
        "naive_delta": 2e-5,
        "counted": 0,
    }
    assert documented.in_tables("budget show") == [shown.keys()]
    spent = Budget(file).spent()
    assert shown["spent"]["counted"] == shown["spent"]["adaptive_epsilon"] == spent.adaptive_epsilon > spent.epsilon
    assert "Spent by 2 runs" in run("show", file, "--delta", "1e-6")
    assert "all 11 claims hold" in run("verify", file)
    assert json.loads(run("verify", file, "--json"))["true"] is True
    run("add", file, saved)
    with pytest.raises(QuellError, match="does not suffice"):
        run("add", file, saved)


def test_a_key_that_was_loaded_needs_a_ledger(tmp_path):
    """Otherwise every run with that key would be charged as one."""
    torch = pytest.importorskip("torch")
    from quell.torch import make_private
    from tests.pytorch.training import examples, network

    budget = Budget.create(tmp_path / "b", name="x", epsilon=9.0, delta=1e-3)
    model, plan = network(), quell.plan(examples=40, batch_size=8, epochs=1, epsilon=8, delta=1e-4, sampling="cyclic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Key.generate().save(tmp_path / "run.key")
    refused = pytest.raises(QuellError, match="pass the path of the key file, or ledger=")
    with pytest.warns(UnrecordedKeyWarning), refused:
        make_private(model, optimizer, examples(), plan, key=Key.load(tmp_path / "run.key"), budget=budget.path)


@pytest.mark.slow
def test_a_mechanism_of_another_plan_is_certified_before_it_is_charged():
    """Its promise was for one participation, this plan has five (found by a review)."""
    once, often = (
        quell.plan(examples=examples, batch_size=40, epochs=epochs, epsilon=2, delta=1e-6, sampling="cyclic")
        for examples, epochs in ((400, 1), (80, 5))
    )
    assert once.steps == often.steps
    with pytest.raises(QuellError, match=r"is not certified to be \(2, 1e-06\)-DP"):
        run_claim(often.prices, once.mechanism)
