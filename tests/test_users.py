"""Plans per user: the run, its file and its words; δ against enumeration; what limits cost; tables of ids."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_array
from typer.testing import CliRunner

from quell import QuellError, cli, privacy
from quell.planning import Plan, Prices, file
from quell.planning.users import user_limits
from quell.run import Run
from quell.schemes import SCHEMES
from quell.schemes.users import UserRows, numbered, shared
from quell.show.statement import privacy_statement
from tests import documented

SMALL = {"users": 60, "batch_size": 6, "epochs": 3, "epsilon": 4.0, "delta": 1e-3, "sampling": "cyclic"}


def made(**changes) -> Plan:
    run = Run.from_data(**{**SMALL, **changes})
    return Plan(run, (Prices(run).price("bsr", bands=2),), 0)


def by_hand(matrix, patterns, sigma, epsilon) -> float:
    """The larger δ of adding and removing a user, by adding up densities on a grid, pattern by pattern."""
    n = len(matrix)
    means = np.array([matrix @ np.array(pattern, dtype=float) for pattern, _ in patterns])
    axes = [np.linspace(-7 * sigma, means[:, i].max() + 7 * sigma, 150) for i in range(n)]
    cell = np.prod([axis[1] - axis[0] for axis in axes])

    def density(mean):
        parts = [
            np.exp(-((axis - m) ** 2) / (2 * sigma**2)) / (sigma * np.sqrt(2 * np.pi))
            for axis, m in zip(axes, mean, strict=True)
        ]
        return parts[0][:, None, None] * parts[1][:, None] * parts[2]

    there = sum(chance * density(mean) for (_, chance), mean in zip(patterns, means, strict=True))
    away = density(np.zeros(n))
    gaps = (there - np.exp(epsilon) * away, away - np.exp(epsilon) * there)
    return max(float(np.maximum(gap, 0).sum() * cell) for gap in gaps)


def chances(name) -> list:
    """All patterns of one of six users in three steps of two users each, from the definition of the scheme."""
    steps = list(itertools.product((0, 1), repeat=3))
    once = [((1, 0, 0), 1 / 3), ((0, 1, 0), 1 / 3), ((0, 0, 1), 1 / 3)]
    if name == "poisson":
        return [(p, (1 / 3) ** sum(p) * (2 / 3) ** (3 - sum(p))) for p in steps]
    if name == "cyclic_poisson":  # its proof lets everyone know the groups: here the worst, with steps 0 and 2
        return [((a, 0, c), (2 / 3) ** (a + c) * (1 / 3) ** (2 - a - c)) for a in (0, 1) for c in (0, 1)]
    if name == "b_min_sep":  # rate 1/2, one step of pause; ready at first with probability 2/3
        ready = {(1, 0, 1): 1 / 4, (1, 0, 0): 1 / 4, (0, 1, 0): 1 / 4, (0, 0, 1): 1 / 8, (0, 0, 0): 1 / 8}
        later = {(0, 1, 0): 1 / 2, (0, 0, 1): 1 / 4, (0, 0, 0): 1 / 4}
        return [(p, 2 / 3 * q) for p, q in ready.items()] + [(p, 1 / 3 * q) for p, q in later.items()]
    return once


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "cyclic"])
def test_delta_per_user_equals_enumeration(name):
    """Six users, two a step, three steps: every pattern of one user, and densities added up on a grid."""
    run = Run.from_data(users=6, batch_size=2, epochs=1, epsilon=1.0, delta=1e-3, sampling=name)
    strategy = Prices(run).build("identity") if name == "poisson" else Prices(run).build("bsr", bands=2)
    scheme, sigma, epsilon = Prices(run).scheme(strategy, SCHEMES[name]), 1.3, 0.7
    patterns = chances(name)
    assert sum(chance for _, chance in patterns) == pytest.approx(1.0)
    exact = by_hand(strategy.matrix(), patterns, sigma, epsilon)
    found = privacy.delta(strategy, scheme, sigma, epsilon)
    assert found.delta >= exact * (1 - 1e-3)
    assert found.delta <= exact * 1.08  # certificates by draws leave a little room
    assert found.bracket[0] <= exact * (1 + 1e-3)


def test_fixed_batches_per_user_equal_enumeration():
    """Without amplification the worst place is certain: a user in the first batch of each epoch, here twice."""
    run = Run.from_data(users=3, batch_size=2, epochs=3, epsilon=1.0, delta=1e-3, sampling="cyclic")
    strategy = Prices(run).build("bsr", bands=2)
    found = privacy.delta(strategy, Prices(run).scheme(strategy, SCHEMES["cyclic"]), 2.5, 0.7)
    assert found.delta == pytest.approx(by_hand(strategy.matrix(), [((1, 1, 1), 1.0)], 2.5, 0.7), rel=2e-3)


def test_a_run_of_users_is_counted_in_users(tmp_path):
    plan = made()
    assert (plan.run.examples, plan.run.drawn, plan.steps) == (60, "user", 30)
    assert (plan.run.participation.separation, plan.run.participation.count) == (10, 3)
    assert plan.run.changed(epochs=6).steps == 60
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["run"]["users"] == 60
    assert "examples" not in content["run"]
    assert Plan.load(tmp_path / "plan.json").run == plan.run
    content["run"]["promise"]["unit"] = "example"  # the same noise would promise less
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert [check.claim for check in file.verify(tmp_path / "plan.json") if not check.holds] == ["run: promise: unit"]
    for odd in ({"examples": 60}, {"separation": 5}):
        content["run"] |= odd
        (tmp_path / "plan.json").write_text(json.dumps(content))
        with pytest.raises(QuellError, match=r"not both|decides how often"):
            file.verify(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"examples": 600}, "batches are drawn of examples or users, not both: give one"),
        ({"separation": 5}, "users= decides how often a user is used: leave separation and participations out"),
        ({"users": 5}, "batch_size=6 is larger than the data set of 5 users"),
        ({"users": 0}, "users=0 must be a whole number"),
        ({"users": None}, "examples=None must be a whole number"),
    ],
)
def test_what_is_not_a_run_of_users(change, message):
    with pytest.raises(QuellError, match=message):
        Run.from_data(**{**SMALL, **change})


@pytest.mark.parametrize("sampling", ["cyclic", "balls_in_bins"])
def test_every_word_of_a_plan_says_user(sampling):
    plan = made(sampling=sampling, delta=0.1)
    for text in (str(plan), " ".join(privacy_statement(plan).values()), plan.page()):
        assert "user" in text
        assert "per example" not in text
        assert "Each example" not in text
    assert "60 users, batches of 6, 3 epochs: 30 steps. Target: (4, 0.1)-DP per user." in str(plan)
    assert "publishing a whole user" in str(plan)
    assert "Each single user, with all their examples" in privacy_statement(plan)["Who is protected"]


def test_what_limits_cost_and_gain():
    counts = np.array([1] * 30 + [10] * 20 + [100] * 10)
    plan = made()
    found = user_limits(plan, counts, rows_per_user=2)
    assert (found.units, found.rows, found.median, found.most, found.example_batch) == (60, 1230, 5, 100, 12)
    assert [each.participations for each in found.limits] == [1, 2, 3, 6, 12]
    for each in found.limits:
        for rows, share in each.seen.items():
            assert share == pytest.approx(sum(min(c, rows * each.participations) for c in counts) / 1230)
    own = {each.participations: each for each in found.limits}[3]
    assert (own.noise_multiplier, own.error) == (plan.mechanism.noise_multiplier, 1.0)
    noise = [each.noise_multiplier for each in found.limits]
    assert noise == sorted(noise)
    alone = Run.from_data(users=60, batch_size=6, epochs=1, epsilon=4.0, delta=1e-3, sampling="cyclic")
    assert noise[0] == pytest.approx(Prices(alone).price("bsr", bands=2).noise_multiplier, rel=1e-3)
    by_examples = SCHEMES["cyclic"](30, 30)  # 1,230 rows in batches of 12: once in thirty steps
    assert found.example_epsilon == pytest.approx(
        privacy.epsilon(plan.mechanism.strategy, by_examples, plan.mechanism.noise_multiplier, 1e-3).epsilon, rel=1e-3
    )
    with pytest.raises(QuellError, match="59 users, but the plan is for 60 users: make a plan with users=59"):
        user_limits(plan, counts[:-1])


def test_rows_seen_are_those_that_come():
    """The share that a table states, against the rows that the loader would take."""
    numbers = np.repeat(np.arange(5), [1, 2, 5, 9, 30])
    rows = UserRows.of(numbers, bytes(32))
    seen = {int(row) for turn in range(4) for row in rows.taken(np.arange(5), turn, 2)}
    assert len(seen) / 47 == pytest.approx(sum(min(c, 8) for c in (1, 2, 5, 9, 30)) / 47)


def test_ids_of_any_kind_are_numbered_alike():
    names = ["b", "a", "b", "c", "a"]
    for ids in (names, np.array(names), np.array(names, dtype=object), [ord(n) for n in names], iter(names)):
        numbers = numbered(ids)
        assert len(set(numbers)) == 3
        assert numbers[0] == numbers[2] != numbers[1] == numbers[4] != numbers[3] != numbers[0]


@pytest.mark.parametrize("number", [numbered, shared])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([7, "7", 8], r"users 7 and '7' \(of example 1\) are ids of different kinds"),
        (["bob", b"bob"], "of different kinds"),
        (np.array([7, "7", 8], dtype=object), "of different kinds"),
        (np.array(["a", "", "b"]), "example 1 has no user"),
        (np.array([b"a", b""]), "example 1 has no user"),
        (np.ma.masked_equal([3, 0, 4], 0), "example 1 has no user"),
        (np.array([1.0, np.nan]), "example 1 has no user"),
        (np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"), "example 1 has no user"),
    ],
)
def test_rows_of_nobody_and_people_with_two_ids_are_refused(number, ids, message):
    """A missing id is somebody's; as a user of its own that person would be two users."""
    with pytest.raises(QuellError, match=message):
        number(ids)


def test_numbers_that_are_equal_are_one_user():
    assert numbered([7, 7.0, True, 1]).tolist() == [0, 0, 1, 1]


owner_sets = st.lists(st.frozensets(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=25)


@given(owner_sets)
def test_groups_are_a_maximal_set_in_which_everyone_is_once(owners):
    numbers = shared([tuple(each) for each in owners])
    groups: dict = {}
    for number, each in zip(numbers.tolist(), owners, strict=True):
        if number >= 0:
            assert groups.setdefault(number, each) == each  # one set of users each
    assert sorted(groups) == list(range(len(groups)))
    everyone = [user for each in groups.values() for user in each]
    assert len(everyone) == len(set(everyone))  # nobody is in two
    for number, each in zip(numbers.tolist(), owners, strict=True):
        assert number >= 0 or any(each & other for other in groups.values())  # and none could be added


@given(owner_sets, st.randoms(use_true_random=False))
def test_groups_depend_on_who_owns_what_alone(owners, random):
    """Other names for the same people, owners in another order, one owner with or without a tuple: the same choice."""
    names = random.sample(range(100, 200), 8)
    renamed = [random.sample([str(names[user]) for user in each], len(each)) for each in owners]
    plain = [each[0] if len(each) == 1 else each for each in renamed]
    assert shared(plain).tolist() == shared([tuple(each) for each in owners]).tolist()


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_groups_keep_most_of_what_any_choice_could(skew):
    """Rows kept, against a linear program that may take groups in part: messages of 300 people, some of them busy."""
    random = np.random.default_rng(0)
    busy = 1 / np.arange(1, 301) ** skew
    owners = [tuple(random.choice(300, 2, replace=False, p=busy / busy.sum())) for _ in range(6000)]
    sizes = Counter(frozenset(each) for each in owners)
    members = [(user, place) for place, each in enumerate(sizes) for user in each]
    once = coo_array((np.ones(len(members)), tuple(zip(*members, strict=True))), shape=(300, len(sizes)))
    most = -linprog(-np.array(list(sizes.values())), A_ub=once, b_ub=np.ones(300), bounds=(0, 1)).fun
    assert 0.85 * most < (shared(owners) >= 0).sum() <= most + 1e-6


def test_larger_groups_come_first_and_one_owner_each_leaves_nobody_out():
    assert shared([("a", "b"), ("b", "c"), ("b", "c"), ("d", "a")]).tolist() == [-1, 0, 0, 1]
    assert shared(np.array([[1, 2], [2, 1], [3, 3]])).tolist() == [0, 0, 1]
    assert sorted(set(shared(["x", "y", "x"]).tolist())) == [0, 1]
    with pytest.raises(QuellError, match="example 1 has no user"):
        shared([("a",), ()])
    rows = UserRows.of(shared([("a", "b"), ("b", "c"), ("b", "c"), ("d", "a")]), bytes(range(32)))
    assert sorted(rows.taken(np.array([0, 1]), 0, 2).tolist()) == [1, 2, 3, 3]


def test_a_promise_with_groups_says_what_is_public(tmp_path):
    run = Run.from_data(**{**{name: value for name, value in SMALL.items() if name != "users"}, "groups": 60})
    plan = Plan(run, (Prices(run).price("bsr", bands=2),), 0)
    assert (run.promise.unit, run.drawn) == ("user", "group")
    assert "60 groups, batches of 6" in str(plan)
    assert str(plan).count("per user with public ownership of examples") == 3
    assert "who owns which, is public" in privacy_statement(plan)["Who is protected"]
    assert "with public ownership of examples" in plan.page()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").run == run


def test_a_table_of_senders_and_receivers(tmp_path):
    path = tmp_path / "mail.csv"
    rows = [f"hello,p{number % 40},p{number % 40 + 40}" for number in range(200)] + ["bye,p0,p1", "note,p90,"]
    path.write_text("\n".join(["text,sender,receiver", *rows]))
    options = ("--users", path, "--user-column", "sender,receiver")
    found = json.loads(quell(*PLAN, *options, "--json").stdout)
    assert (found["run"]["groups"], found["user_limits"]["left_out"]) == (41, 1)
    assert found["user_limits"]["limits"][-1]["seen"]["16"] == pytest.approx(201 / 202)
    shown = " ".join(quell(*PLAN, *options).stdout.split())
    for text in ("41 groups have 201 rows", "1 row more are left out", "per user with public ownership of examples"):
        assert text in shown


def test_a_million_rows_take_seconds():
    random = np.random.default_rng(0)
    rows = UserRows.of(random.integers(0, 10**5, 10**6), bytes(range(32)))
    assert rows.order.nbytes == 4 * 10**6
    assert rows.users == 10**5
    taken = rows.taken(np.arange(0, 10**5, 100), 3, 4).reshape(-1, 4)
    assert len(taken) == 1000


def quell(*arguments):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments], catch_exceptions=False)


PLAN = ("plan", "--batch-size", 5, "--epochs", 2, "--epsilon", 4, "--delta", 1e-3, "--fast")


@pytest.mark.parametrize("kind", ["csv", "tsv", "txt", "npy"])
def test_a_table_of_ids_makes_a_plan(tmp_path, kind):
    ids = [f"u{number % 20}" for number in range(150)]
    path = tmp_path / f"ids.{kind}"
    if kind == "npy":
        np.save(path, np.array(ids))
    elif kind == "txt":
        path.write_text("\n".join(ids) + "\n")
    else:
        gap = "," if kind == "csv" else "\t"
        path.write_text("\n".join([gap.join(("text", "who")), *(gap.join((f'"a{gap}b"', each)) for each in ids)]))
    column = ("--user-column", "who") if kind in ("csv", "tsv") else ()
    found = json.loads(quell(*PLAN, "--users", path, *column, "--rows-per-user", 2, "--json").stdout)
    assert found["run"]["users"] == 20
    assert found["user_limits"]["rows"] == 150
    keys = {"user_limits", *found["user_limits"], *found["user_limits"]["limits"][0]}
    (documentation,) = [part for part in documented.section("plan").split("\n\n") if "With a table of user" in part]
    assert documented.quoted(documentation) == keys | {"user", "group"}
    assert found["user_limits"]["limits"][-1]["seen"]["16"] == 1.0


def test_what_is_said_about_a_table(tmp_path):
    path = tmp_path / "ids.csv"
    path.write_text("user\n" + "\n".join(f"u{number % 20}" for number in range(150)))
    shown = " ".join(quell(*PLAN, "--users", path).stdout.split())
    for text in (
        "20 users, batches of 5",
        "20 users have 150 rows: 7 in the median, at most 8.",
        "per example with about",
    ):
        assert text in shown


def test_steps_can_be_spent_on_users(tmp_path):
    options = ("plan", "--epsilon", 4, "--delta", 1e-3, "--fast", "--draws", 1, "--memory", 0, "--steps", 6)
    shown = quell(*options, "--users", 12).stdout
    assert "error per user seen" in " ".join(shown.split())
    (tmp_path / "ids.txt").write_text("a\nb\n")
    with pytest.raises(QuellError, match="does not go with --rows-per-user"):
        quell(*options, "--users", tmp_path / "ids.txt", "--rows-per-user", 2)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a,b\n1,2\n", (), "has the columns a, b: say with --user-column"),
        ("a,b\n1,2\n", ("--user-column", "c"), "has the columns a, b: say with --user-column"),
        ("user\n", (), "names no users"),
        ('user\nx\n""\n', (), "example 1 has no user"),
        ("user,b\nx,1\n,2\n", (), "example 1 has no user"),
    ],
)
def test_tables_that_do_not_name_users(tmp_path, content, options, message):
    path = tmp_path / "ids.csv"
    path.write_text(content)
    with pytest.raises(QuellError, match=message):
        quell(*PLAN, "--users", path, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"plan needs --examples \(or --users\)"),
        (("--users", "nowhere.csv"), "cannot read the users of nowhere.csv"),
        (("--users", "ids.parquet"), "is not a table of ids"),
        (("--users", "9" * 5000), "is not a table of ids"),
        (("--users", "20", "--rows-per-user", 2), "--rows-per-user is for a table of user ids"),
        (("--users", "20", "--user-column", "a"), "--user-column is for a table of user ids"),
        (("--users", "20", "--examples", 100), "batches are drawn of examples or users"),
        (("--users", "20", "--participations", 1), "leave separation and participations out"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(QuellError, match=message):
        quell(*PLAN, *options)


@pytest.mark.slow
def test_the_page_about_users_shows_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    random, path = Random(1), tmp_path / "ids.csv"
    ids = [f"u{user}" for user in range(1000) for _ in range(max(1, int(random.paretovariate(1.1) * 4)))]
    path.write_text("\n".join(["text,user", *(f"t,{each}" for each in ids)]))
    page = (Path(__file__).parents[1] / "docs" / "users.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    quell (plan --users ids.csv .*)$", page, re.MULTILINE)
    shown = quell(*command.replace("ids.csv", str(path)).split()).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    rows = re.findall(r"^\| (\d+ \| ~.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    assert [row for row in rows if row.replace(" | ", " ") not in lines] == [], shown
    said = " ".join(shown.split())
    assert "1,000 users have 20,818 rows: 7 in the median, at most 1,226." in said
    assert "in batches of 200 of the 20,818 examples, would be private per example with about ε = 3.4 at" in said


def test_ids_in_tensors_are_the_same_user_twice():
    """Tensors hash by identity; every row would be a user of its own (found by a review)."""
    torch = pytest.importorskip("torch")
    ids = [torch.tensor(number % 10) for number in range(40)]
    assert numbered(ids).max() == 9
    with pytest.raises(QuellError, match="cannot be an id"):
        numbered([object() for _ in range(4)])
