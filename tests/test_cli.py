"""The command line as a user meets it, in a fresh process where that matters."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from quell import cli, privacy
from quell.cli import plan
from quell.errors import QuellError
from quell.show import bar
from quell.strategy import FAMILIES
from tests import documented
from tests.commands import PLAN, RUN, main, quell, remembered


@pytest.fixture(scope="module", autouse=True)
def one_search_per_run():
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "make_plan", remembered)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a plan, and what was printed with it."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    return path, quell(*PLAN, "--save", str(path))


def fresh_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quell", *arguments], capture_output=True, text=True, timeout=120)


def rows(*arguments: str) -> list[dict]:
    return json.loads(quell(*arguments, "--json"))["mechanisms"]


def test_price_speaks_json():
    found = json.loads(quell("price", "bisr", "--bands", "16", *RUN, "--json"))
    (row,) = found["mechanisms"]
    assert (row["family"], row["parameters"]["bands"]) == ("bisr", 16)
    assert found["run"]["separation"] == 390
    assert row["error"]["rmse"] == pytest.approx(17.95, rel=1e-3)
    assert row["guarantee"]["adjacency"] == "zero-out"


@pytest.mark.parametrize(("beta", "first"), [([], 0.9), (["--momentum", "0.8"], 0.8)])
def test_adam_is_planned_for_by_its_name(beta, first):
    by_name = json.loads(quell("price", "bisr", "--bands", "4", *RUN, "--optimizer", "adamw", *beta, "--json"))
    by_hand = ["--momentum", str(first), "--adaptive"]
    assert by_name == json.loads(quell("price", "bisr", "--bands", "4", *RUN, *by_hand, "--json"))
    assert by_name["run"]["optimizer"]["momentum"] == first


def test_left_over_steps_allow_one_more_participation():
    run = ["--steps", "781", "--epochs", "10", "--epsilon", "9", "--delta", "1e-5", "--momentum", "0.9"]
    (row,) = rows("price", "bsr", "--bands", "4", *run, "--weight-decay", "0.9999")
    assert round(row["noise"]["multiplier"], 1) == 3.3
    assert "at most 11 times, at least 78 steps apart" in " ".join(quell("price", "identity", *run).split())
    wider = " ".join(quell("price", "identity", *run, "--separation", "80").split())
    assert "at most 10 times, at least 80 steps apart" in wider


def test_price_prints_a_table_and_a_promise():
    text = quell("price", "lambda-cgd", "--lambda", "0.9", "--column-normalise", *RUN)
    assert "lambda_cgd* λ=0.9" in text
    assert "Promise: (8, 10⁻⁵)-DP" in text


def test_plan_saves_a_file_that_verifies(saved, tmp_path):
    (path, text), picture = saved, tmp_path / "plan.png"
    assert text.startswith("Use ")
    assert f"Written: {path}" in text
    assert f"Written: {picture}" in quell(*PLAN, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    verified, printed = json.loads(quell("verify", str(path), "--json")), json.loads(quell(*PLAN, "--json"))
    assert verified["true"] is True
    assert printed == {**json.loads(path.read_text()), "meaning": verified["meaning"]}
    assert "Nothing was found that breaks the promise" in " ".join(
        quell("audit", str(path), "--canaries", "500").split()
    )


@pytest.mark.slow
def test_a_false_plan_fails_loudly(saved, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(saved[0].read_text().replace('"epsilon": 4.0', '"epsilon": 1.0'))
    result = fresh_process("verify", str(path))
    assert result.returncode == 1
    assert "claims are false" in " ".join(result.stderr.split())
    asked = CliRunner().invoke(cli.app, ["verify", str(path), "--json"])
    assert (asked.exit_code, json.loads(asked.stdout)["true"]) == (1, False)


def test_compare_sweeps_as_table_csv_json_and_plot(tmp_path):
    picture = tmp_path / "sweep.svg"
    text = quell("compare", "bisr", "--bands", "2,4,8", *RUN, "--plot", str(picture))
    assert "➤ bisr p=8" in text  # the least RMSE
    assert "➤: best." in text
    assert f"Written: {picture}" in text
    assert "<svg" in picture.read_text()
    table = list(csv.DictReader(io.StringIO(quell("compare", "bisr", "--bands", "2:8:4", *RUN, "--csv"))))
    assert [row["bands"] for row in table] == ["2", "4", "6", "8"]
    swept = rows("compare", "fractional", "--bands", "4", "--gamma", "0.5,0.75", *RUN)
    assert [row["parameters"]["gamma"] for row in swept] == [0.5, 0.75]


def test_a_target_rmse_plans_for_the_rmse(monkeypatch):
    monkeypatch.setattr(plan, "plan_for_rmse", lambda run, target, progress: plan.make_plan(run))
    for more in ([], ["--objective", "rmse"]):
        assert json.loads(quell(*PLAN, "--target-rmse", "9", *more, "--json"))["run"]["objective"] == "rmse"
    assert json.loads(quell(*PLAN, "--json"))["run"]["objective"] == "training"


def test_compare_sweeps_divergences():
    swept = rows("compare", "band_inv", "--bands", "4", "--divergence", "0.5,5", *RUN)
    assert [row["parameters"]["divergence"] for row in swept] == [0.5, 5.0]
    assert swept[-1:] == rows("price", "band_inv", "--bands", "4", "--divergence", "5", *RUN)


def test_compare_sweeps_horizons():
    swept = rows("compare", "blt", "--buffers", "1", "--horizon", "50:97:3", *RUN)
    assert [row["parameters"]["horizon"] for row in swept] == [50, 74, 97]
    assert swept[-1:] == rows("price", "blt", "--buffers", "1", "--horizon", "97", *RUN)


def test_json_has_the_documented_keys(tmp_path, monkeypatch):
    """Those of `train` are in tests/train."""

    def printed(*arguments: str):
        return json.loads(quell(*arguments, "--json"))

    prices = [
        ["fractional", "--bands", "4"],
        ["band_inv", "--bands", "2"],
        ["blt", "--buffers", "1", "--horizon", "97"],
        ["band_inv", "--bands", "2", "--divergence", "3"],
    ]
    priced = [printed("price", *arguments, *RUN) for arguments in prices]
    averaged = printed("price", "identity", *RUN, "--ema", "0.9")
    path = tmp_path / "plan.json"
    planned = printed(*PLAN, "--save", str(path))
    quell(*PLAN, "--mechanism", "bisr p=2", "--save", str(tmp_path / "other.json"))
    by_loss = printed(*PLAN, "--mechanism", "bisr p=2", "--objective", "loss")
    users = printed(*PLAN, "--participations", "3", "--separation", "5")
    drawn = printed(*("--users" if each == "--examples" else each for each in PLAN))
    top, run, yardsticks, mechanism = documented.in_tables("price")
    assert all(top == each.keys() for each in priced)
    assert run == priced[0]["run"].keys() | planned["run"].keys() | users["run"].keys() | drawn["run"].keys()
    assert yardsticks == planned["yardsticks"].keys()
    rows = [row for each in (*priced, planned) for row in each["mechanisms"]]
    assert mechanism == {key for row in rows for key in row}
    lines = documented.section("price").splitlines()
    for group in ("noise", "error", "guarantee"):
        (line,) = [line for line in lines if line.startswith(f"| `{group}`")]
        shown = rows[0][group].keys() | by_loss["mechanisms"][0][group].keys()
        assert documented.quoted(line.split("|")[2]) - {"exact"} == shown
    (line,) = [line for line in lines if line.startswith("| `parameters`")]
    assert documented.quoted(line) - {"parameters"} == {name for row in rows for name in row["parameters"]}
    for group in ("promise", "optimizer", "limits"):
        (line,) = [line for line in lines if line.startswith(f"| `{group}`")]
        shown = planned["run"][group].keys() | averaged["run"].get(group, {}).keys()
        assert documented.quoted(line.split("|")[2]) - {"example", "user"} == shown
    assert documented.in_tables("plan") == [planned.keys()]
    compared = printed("diff", str(path), str(path.with_name("other.json")))
    assert documented.quoted(documented.section("diff")) == compared.keys() | compared["differences"][0].keys()
    checked = printed("verify", str(path))
    assert documented.quoted(documented.section("verify")) == checked.keys() | checked["checks"][0].keys()
    audited = printed("audit", str(path), "--canaries", "100")
    assert documented.quoted(documented.section("audit")) == audited.keys() | audited["bound"].keys()
    assert documented.quoted(documented.section("mechanisms")) == printed("mechanisms")[0].keys()
    monkeypatch.setenv("QUELL_CACHE", str(tmp_path))
    assert documented.quoted(documented.section("bench")) == printed("bench", "--parameters", "20000").keys()


def test_mechanisms_lists_every_family():
    text = quell("mechanisms")
    listed = json.loads(quell("mechanisms", "--json"))
    assert [row["mechanism"] for row in listed] == list(FAMILIES)
    assert all(name in text for name in FAMILIES)


def test_help_shows_examples_and_every_command():
    text = quell("--help")
    for word in ("plan", "price", "compare", "verify", "mechanisms", "Exit status", "correlated noise"):
        assert word in text
    assert quell("--version").startswith("quell ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["price", "magic", *RUN], "there is no mechanism 'magic'"),
        (["price", "bisr", *RUN], "bisr needs bands"),
        (["price", "dense", *RUN], "take band_toeplitz with bands=16"),
        (["price", "identity", *RUN, "--sampling", "random"], "there is no sampling scheme 'random'"),
        (
            ["price", "bsr", "--bands", "16", *RUN, "--sampling", "poisson"],
            "poisson sampling is priced for independent",
        ),
        (
            ["price", "identity", "--steps", "5", "--epochs", "9", "--epsilon", "1", "--delta", "0.1"],
            "epochs=9 do not fit",
        ),
        (["price", "identity", *RUN, "--separation", "4000"], "separation=4000 exceeds"),
        (["price", "identity", *RUN, "--momentum", "1"], "momentum < weight_decay"),
        (["compare", "bisr", "--bands", "4", *RUN], "compare sweeps exactly one parameter"),
        (["compare", "bisr", "--bands", "two,four", *RUN], "neither a number nor a sweep"),
        ([*PLAN, "--memory", "lots"], "must be a number of model copies"),
        ([*PLAN, "--batch-size", "0"], "batch_size=0 must be"),
        ([*PLAN, "--epochs", "0"], "epochs=0 must be"),
        ([*PLAN, "--steps", "60"], "does not go with --batch-size, --epochs"),
        ([*PLAN, "--step-seconds", "0.1"], "--step-seconds is for --noise-share"),
        ([*PLAN, "--device", "tpu"], "--device is for --noise-share"),
        ([*PLAN, "--parameters", "-5"], "parameters=-5 must be a whole number"),
        (["price", "bisr", "--bands", "4", "--lambda", "0.5", *RUN], "it takes bands, column_normalise"),
        (
            [*PLAN, "--target-rmse", "9", "--objective", "training"],
            "a target RMSE minimises the rmse, not the objective training",
        ),
        (["verify", "/nowhere/plan.json"], "cannot read the plan"),
        (["verify", "/"], "cannot read /: it is a folder; give the plan file in it"),
        ([*PLAN, "--plot", "/nowhere/x.png"], "cannot write /nowhere/x.png: there is no folder"),
        ([*PLAN, "--html", "/nowhere/x.html"], "cannot write /nowhere/x.html"),
        ([*PLAN, "--save", "/tmp"], "cannot write /tmp: it is a folder"),
        ([*PLAN, "--plot", "x.foo"], "use a name ending in .png, .svg or .pdf"),
        (["compare", "bisr", "--bands", "2,4", *RUN, "--plot", "x"], "use a name ending in .png, .svg or .pdf"),
    ],
)
def test_bad_requests_are_named(arguments, message):
    with pytest.raises(QuellError, match=message):
        quell(*arguments)


@pytest.mark.parametrize(
    "arguments", [["price", "magic", *RUN], ["price", "identity", *RUN[:-1], "-3"], ["plan"], ["nonsense"]]
)
def test_bad_input_is_one_sentence_and_status_2(arguments, monkeypatch, capsys):
    status, out, errors = main(monkeypatch, capsys, *arguments)
    assert (status, out) == (2, "")
    assert errors.startswith("quell: ")
    assert "Traceback" not in errors


def test_importing_quell_is_light():
    """Neither SciPy nor a framework is loaded until something is computed."""
    code = (
        "import sys, quell; print([m for m in ('numpy', 'scipy', 'torch', 'jax', 'rich', 'numba') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_planning_loads_no_framework():
    code = (
        "import sys, quell; run = dict(examples=100, batch_size=10, epochs=2, epsilon=1, delta=1e-3, memory=0); "
        "quell.plan(**run, sampling='cyclic'); quell.plan(**run, mechanism='bisr p=2', sampling='balls_in_bins'); "
        "print([m for m in ('torch', 'jax', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["price", "[/red]", *RUN], ["verify", "x[/b].json"], ["verify", "x[red].json"]])
def test_brackets_in_names_are_only_brackets(arguments, monkeypatch, capsys):
    status, _, errors = main(monkeypatch, capsys, *arguments)
    assert status == 2
    assert arguments[1] in errors


def test_a_decay_rate_is_not_a_decay_factor():
    with pytest.raises(QuellError, match="must be the factor that multiplies the weights"):
        quell("price", "identity", *RUN, "--weight-decay", "1e-4")


def test_one_band_is_independent_noise():
    for name in ("bsr", "band_toeplitz", "band_inv", "band"):
        found = json.loads(quell("price", name, "--bands", "1", *RUN, "--json"))
        (row,) = found["mechanisms"]
        assert (row["noise"]["buffers"], row["noise"]["draws"]) == (0, 1)
        assert row["error"]["rmse"] == pytest.approx(found["yardsticks"]["dpsgd_rmse"], rel=1e-9)


def test_the_readmes_rooms_are_reachable():
    code = "import quell; print(len(quell.strategy.FAMILIES), quell.workload.prefix(3).steps)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(len(FAMILIES)), "3"]


@pytest.mark.slow
def test_compare_splits_the_failure_probability_between_its_rows(monkeypatch):
    """A reader picks the best row, so each certificate by draws must know how many there are."""
    asked = []
    certify = privacy.calibrate

    def calibrate(strategy, scheme, epsilon, delta, comparisons=1, near=None):
        asked.append(comparisons)
        return certify(strategy, scheme, epsilon, delta, comparisons, near)

    monkeypatch.setattr(privacy, "calibrate", calibrate)
    run = ["--steps", "40", "--epochs", "4", "--epsilon", "4", "--delta", "1e-5", "--sampling", "balls_in_bins"]
    quell("compare", "bisr", "--bands", "2,3,4", *run)
    assert asked == [3, 3, 3]


@pytest.mark.parametrize("width", [120, 80, 60, 45, 30])
def test_no_terminal_is_too_narrow_for_a_number(width, monkeypatch):
    """Columns are left out instead; every number that is shown is shown whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    run = ["--steps", "6000000", "--epochs", "600", "--epsilon", "4", "--delta", "1e-6"]
    wide = {"42.49", "10,630", "15,030", "4.8×"}
    line = next(line for line in quell("price", "bisr", "--bands", "16", *run).splitlines() if "10,630" in line)
    assert {word for word in line.split() if word[0].isdigit() and len(word) > 2} <= wide
    assert len(line) <= width
    if width >= 80:
        assert wide <= set(line.split())


def test_a_narrow_plan_names_what_it_minimises_without_its_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    shown = " ".join(quell(*PLAN, "--memory", "0", "--draws", "1").split())
    assert "The plan minimises the predicted training error." in shown
    assert "train:" not in shown


def test_output_without_a_terminal_is_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert any(len(line) > 100 for line in quell("price", "bisr", "--bands", "16", *RUN).splitlines())


def test_strategies_shaped_for_a_horizon_have_names_of_their_own():
    rows = [quell("price", "blt", "--buffers", "1", *RUN, *more) for more in ([], ["--horizon", "97"])]
    assert ["h=97" in row.split("σ:")[0] for row in rows] == [False, True]


def interrupted(program, *arguments):
    """Status and errors of Python code that is interrupted, half a second after it said that it is ready."""
    take = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in background jobs
    child = subprocess.Popen(
        [sys.executable, "-c", f"{take}; {program}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "QUELL_CACHE": "off"},
    )
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    try:
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, errors.splitlines()


def test_ctrl_c_ends_with_one_line():
    """As from a terminal: SIGINT in the middle of a plan."""
    long = [*PLAN[:1], *PLAN[2:], "--momentum", "0.9"]
    program = "import quell.cli as c; print('ready', flush=True); c.main()"
    assert interrupted(program, *long) == (130, ["quell: interrupted"])


def test_ctrl_c_is_not_lost_where_compiled_code_calls_python():
    """Numba does while it compiles; errors there go to nobody."""
    program = """
import ctypes, time
import quell.cli as c
@ctypes.CFUNCTYPE(None)
def called():
    print("ready", flush=True)
    time.sleep(60)
def app(**_):
    called()
    while True:
        time.sleep(0.01)
c.app = app
c.main()"""
    assert interrupted(program) == (130, ["quell: interrupted"])


def test_progress_counts_only_what_is_known():
    progress = bar.Bar(bar.Count())
    task = progress.add_task("pricing", total=None)
    assert str(bar.Count().render(progress.tasks[task])) == ""
    progress.update(task, completed=3, total=7)
    assert str(bar.Count().render(progress.tasks[task])) == "3/7"


def test_fast_does_not_silently_drop_a_scheme():
    with pytest.raises(QuellError, match="--fast means --sampling cyclic"):
        quell(*PLAN, "--sampling", "poisson")
