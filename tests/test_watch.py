"""`quell watch`: a log as people see it."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quell import cli
from quell.cli import terminal
from quell.errors import QuellError
from quell.show.watching import watch_content, watch_page
from quell.watching.log import Log, RunLog
from quell.watching.reading import Follower

ABOUT = {
    "key": "k1",
    "seeded": False,
    "mechanism": "bisr(bands=4) over 3,900 steps",
    "unit": "one example",
    "sampling": "cyclic",
    "steps": 3900,
    "epsilon_at_the_end": 8.0,
    "delta": 1e-5,
    "noise_multiplier": 1.2,
    "max_grad_norm": 1.0,
    "expected_batch_size": 128.0,
}


def row(step, **others):
    known = {"step": step, "steps_left": 3900 - step, "epsilon_at_most": 8 * step / 3900, "epsilon_is": "of so many"}
    known |= {"gradient_norm": 1.2, "noise_norm": 1.1, "noise_to_signal": 2.3, "step_seconds": 0.5}
    return {**known, "noise_seconds": 0.05, **others}


def logged(folder, steps=(10, 20, 30), norms=False, **others):
    log = RunLog(Log(folder, norms=norms), ABOUT)
    for step in steps:
        log.write(row(step, **others))
    log.close()
    return folder


def watch(*arguments, columns=80):
    result = CliRunner().invoke(cli.app, ["watch", *map(str, arguments)], env={"COLUMNS": str(columns)})
    if isinstance(result.exception, QuellError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [80, 120])
def test_the_terminal_says_how_a_run_stands(tmp_path, columns):
    text = watch(logged(tmp_path), columns=columns)
    assert all(len(line) <= columns for line in text.splitlines())
    said = " ".join(text.split())
    for part in (
        "30 of 3,900",
        "3,870 left, about 32 min",
        "at most 0.06154",
        "Of so many",
        "about 2.3",
        "50 ms (10%)",
    ):
        assert part in said
    assert "rivate" not in said


def test_a_terminal_follows_the_run_to_its_end(tmp_path, monkeypatch):
    """Also where nobody has the time to look at every row, and until somebody has seen enough."""
    folder, screen = logged(tmp_path / "log"), io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, force_terminal=True, width=80))
    steps = iter((50, 3900, None))

    def a_second(_):
        step = next(steps)
        if step is None:
            raise KeyboardInterrupt
        log = RunLog(Log(folder), ABOUT)
        log.write(row(step))
        log.close()

    monkeypatch.setattr(cli.watch.time, "sleep", a_second)
    watch(folder, "--html", tmp_path / "page.html")
    shown = screen.getvalue()
    assert [part in shown for part in ("30 of 3,900", "50 of 3,900", "3,900 of 3,900", "done")] == [True] * 4
    assert '"ended":true' in (tmp_path / "page.html").read_text()
    assert next(steps) is None
    steps = iter((None,))
    watch(logged(tmp_path / "other"))
    assert "the run goes on" in screen.getvalue()


def test_numbers_that_are_not_private_say_so_where_they_are_shown(tmp_path):
    norms = {"clipped_share_not_private": 0.83, "median_norm_not_private": 2.1}
    folder = logged(tmp_path, norms=True, **norms)
    said = " ".join(watch(folder).split())
    assert "Clipped (not private) 83% of gradients" in said
    assert said.count("NOT covered by the promise") == 2
    assert "Show it only to people who may see the data" in said
    watch(folder, "--html", tmp_path / "page.html")
    for path in (folder / "log.csv", tmp_path / "page.html"):
        assert path.stat().st_mode & 0o077 == 0


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    folder = logged(tmp_path)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "mechanism": "\x1b[31m"}))
    with pytest.raises(QuellError, match="is damaged"):
        watch(folder)


def test_the_gradient_may_be_hidden_and_the_log_empty(tmp_path):
    assert "not visible" in watch(logged(tmp_path / "hidden", noise_to_signal=None))
    said = " ".join(watch(logged(tmp_path / "new", steps=())).split())
    assert "0 of 3,900" in said
    assert "Nothing was released" in said


def test_a_page_and_json_show_the_same(tmp_path):
    folder, page = logged(tmp_path / "log"), tmp_path / "watch.html"
    watch(folder, "--html", page)
    content = json.loads(watch(folder, "--json"))
    assert content["curves"]["epsilon_at_most"]["x"] == [10, 20, 30]
    text = page.read_text()
    assert "3,870 left, about 32 min" in text
    assert "NOT PRIVATE" in text  # the script knows the words, and shows them with curves that are there
    assert not any(
        name in text.split('id="data">')[1].split("</script>")[0] for name in ("clipped_share", "median_norm")
    )
    assert '"refresh":5' in watch_page(content, 5)
    assert '"refresh":null' in watch_page({**content, "ended": True}, 5)


def test_a_long_log_is_thinned_to_its_end():
    rows = [row(step) for step in range(1, 3001)]
    curve = watch_content("x", {**ABOUT, "columns": Log("x").meanings}, rows)["curves"]["gradient_norm"]
    assert 300 <= len(curve["x"]) <= 400
    assert curve["x"][-1] == 3000


def test_a_log_is_read_while_it_is_written(tmp_path):
    follower = Follower(logged(tmp_path, steps=(10,)))
    assert follower.poll()
    assert not follower.poll()
    with open(tmp_path / "log.csv", "a") as file:
        file.write("20,3880,1,of so many,1.2,")
        file.flush()
        assert not follower.poll()
        file.write("1.1,nan,0.5,0.05\nnonsense\n\n20,3880,1,again,1,1,1,1,1\n3900,0,8,all,1.2,1.1,,0.5,0.05\n")
    assert follower.poll()
    assert [(one["step"], one["noise_to_signal"]) for one in follower.rows] == [(10, 2.3), (20, None), (3900, None)]
    assert follower.ended


def test_folders_without_a_log_are_refused(tmp_path):
    with pytest.raises(QuellError, match="cannot read the log"):
        watch(tmp_path)
    logged(tmp_path / "planned-1")
    assert "planned-1" in watch(tmp_path, columns=200), "one run needs no choice"
    logged(tmp_path / "planned-2")
    with pytest.raises(QuellError, match="the logs of 2 runs: watch one of them"):
        watch(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(QuellError, match="is not the log of a run"):
        watch(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(QuellError, match="damaged"):
        watch(tmp_path)
