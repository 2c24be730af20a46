"""The live page's server: whom it answers, what it refuses, and that only the latest question counts."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading

import pytest

from quell.errors import QuellError
from quell.planning import Plan, Prices
from quell.progress import announce
from quell.run import Run
from quell.serve import desk as live
from quell.serve import server as web
from quell.serve.controls import controls, presets
from quell.serve.desk import Desk, Question, draft_plan, read_question
from quell.serve.server import PageServer

SETUP = Run.from_data(examples=2000, batch_size=100, epochs=2, epsilon=8.0, delta=1e-5, sampling="cyclic")


@pytest.fixture(scope="module")
def server():
    running = PageServer(SETUP, 0)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=60)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, response.headers, body


def answered(question: Question, desk: Desk | None = None) -> list[dict]:
    """All that the desk tells about a question."""
    told: list[dict] = []
    (desk or Desk()).answer(question, told.append)
    return told


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_comes_with_security_headers(server):
    status, headers, body = ask(server, "/")
    assert status == 200
    assert body.startswith("<!doctype html>")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("path", ["/", "/plan?epsilon=4", "/elsewhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost.evil.example:{port}", ""]
)
def test_foreign_names_are_refused(server, path, host):
    status, _, body = ask(server, path, Host=host.format(port=server.server_address[1]))
    assert status == 403
    assert "answers only to" in json.loads(body)["error"]


def test_localhost_is_a_name_of_this_machine(server):
    assert ask(server, "/", Host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_cannot_make_it_compute(server, site):
    assert ask(server, "/plan?kind=draft", **{"Sec-Fetch-Site": site})[0] == 403


def test_a_plan_is_lines_of_json(server):
    status, headers, body = ask(server, "/plan?kind=draft&epsilon=2", **{"Sec-Fetch-Site": "same-origin"})
    assert status == 200
    assert headers["Content-Type"].startswith("application/x-ndjson")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "Target: (2, 10⁻⁵)" in json.loads(body.splitlines()[-1])["plan"]["setup"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_but_reading_is_answered(server, method):
    status, headers, body = ask(server, "/plan", method)
    assert status == 501
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "error" in json.loads(body)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("epsilon=0", "epsilon=0 must lie between"),
        ("epsilon=nan", "must lie between"),
        ("epsilon=1e9", "must lie between"),
        ("epsilon=<b>", "must be a number"),
        ("epochs=2.5", "must be a whole number"),
        ("epochs=100000", "must lie between"),
        ("memory=-1", "must lie between"),
        ("momentum=1", "must lie between"),
        ("delta=1", "must lie between"),
        ("batch_size=5000", "larger than the data set"),
        ("sampling=magic", "no sampling scheme"),
        ("epochs=10000&batch_size=1", "too long for a live page"),
        ("epsilon=1&epsilon=2", "given twice"),
        ("password=1", "there is no parameter"),
        ("kind=other", "must be draft, full or certify"),
        ("kind=certify", "goes with a mechanism"),
        ("mechanism=bisr", "goes with a mechanism"),
        ("kind=certify&mechanism=magic", "there is no mechanism"),
        ("optimizer=magic", "must be sgd or adam"),
        ("optimizer=adam&momentum=0.5", "momentum=0.5 is SGD's"),
        ("examples=50%2C00", "must be a whole number"),
        ("&".join(f"x{i}=1" for i in range(100)), "must have the form"),
    ],
)
def test_out_of_range_is_one_sentence(server, query, message):
    status, _, body = ask(server, f"/plan?{query}")
    assert status == 400
    assert message in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("epsilon=0", "epsilon"),
        ("examples=many", "examples"),
        ("delta=x", "delta"),
        ("batch_size=5000", "batch_size"),
        ("epochs=10000&batch_size=1", "batch_size"),
        ("password=1", None),
    ],
)
def test_a_refusal_names_the_faulty_field(server, query, field):
    assert json.loads(ask(server, f"/plan?{query}")[2])["field"] == field


def test_an_unforeseen_failure_is_json_too(server, monkeypatch, capsys):
    monkeypatch.setattr(live, "draft_plan", lambda run: 1 / 0)
    status, _, body = ask(server, "/plan?kind=draft")
    assert status == 500
    assert "ZeroDivisionError" in json.loads(body)["error"]
    assert "Traceback" in capsys.readouterr().err


def test_a_question_changes_only_what_it_names():
    question = read_question("epsilon=3&memory=unlimited&optimizer=adam&kind=draft", SETUP)
    assert question == Question(SETUP.changed(epsilon=3.0, memory=None, optimizer="adam"), "draft")


@pytest.mark.parametrize("text", ["50000", "50%2C000", "50k", "50K", "0.05M", "5e4"])
def test_counts_are_read_as_people_write_them(text):
    assert read_question(f"examples={text}", SETUP).run.examples == 50_000


def test_an_empty_delta_follows_the_examples():
    assert read_question("delta=&examples=60k", SETUP).run.delta == 1e-6
    shown = {control["name"]: control["value"] for control in controls(SETUP, usual_delta=True)}
    assert shown["delta"] == ""
    assert {control["name"]: control["value"] for control in controls(SETUP)}["delta"] == 1e-5


def test_every_slider_stands_at_its_value_and_every_stop_is_allowed():
    for control in controls(SETUP.changed(epsilon=7.7, memory=None, batch_size=100)):
        assert control["value"] in control.get("stops", control.get("options", [control["value"]]))
        for stop in control.get("stops", []):
            if control["name"] != "batch_size" or stop <= SETUP.examples:
                read_question(f"{control['name']}={stop}", SETUP)


def test_every_preset_sets_every_control_to_something_that_is_accepted():
    names = {control["name"] for control in controls(SETUP)}
    for values in presets().values():
        assert set(values) == names
        run = read_question("&".join(f"{name}={value}" for name, value in values.items()), SETUP).run
        assert run.examples is not None
        assert run.delta <= 1 / (10 * run.examples)


def test_a_draft_is_a_sound_plan_under_fixed_batches():
    draft = draft_plan(SETUP.changed(sampling="best", memory=0, draws=1))
    assert draft.mechanism.guarantee.sampling == "cyclic"
    assert draft.mechanism.name == "identity"
    assert draft_plan(SETUP).mechanism.rmse < draft.mechanism.rmse


def test_a_preview_compares_with_the_same_dpsgd_as_the_full_plan_and_says_what_it_is():
    run = SETUP.changed(sampling="best")
    preview = answered(Question(run, "draft"))[-1]["plan"]
    assert preview["baseline"]["sampling"] == "poisson"
    assert preview["baseline"]["rmse"] == Prices(run).dpsgd.rmse
    assert preview["preview"] is True


def test_a_full_answer_is_the_plan_and_then_the_plan_with_all_reasons(plan, monkeypatch):
    monkeypatch.setattr(live, "make_plan", lambda run, progress: plan)
    brief, thorough = (part["plan"] for part in answered(Question(plan.run)) if "plan" in part)
    assert brief["preview"] is thorough["preview"] is False
    assert (
        brief["mechanisms"][brief["recommended"]]["label"] == thorough["mechanisms"][thorough["recommended"]]["label"]
    )
    assert len(brief["why"]) == 1 < len(thorough["why"])


def test_certifying_a_row_gives_a_plan_file_that_holds(tmp_path):
    run = Run.from_data(examples=100, batch_size=20, epochs=2, epsilon=4.0, delta=1e-3, sampling="cyclic")
    row = answered(Question(run, "certify", "bisr p=2"))[-1]["row"]
    assert row["certified"] is True
    file = tmp_path / "plan.json"
    file.write_text(row["file"])
    loaded = Plan.load(file)
    assert (loaded.run, loaded.mechanism.name) == (run, "bisr")
    assert loaded.mechanism.noise_multiplier <= float(row["sigma"])


@pytest.fixture
def search(monkeypatch):
    """Searches that go on until they are let go, and count how many were begun and ended early."""

    class Search:
        begun, ended, free = 0, 0, threading.Event()

        def __call__(self, run, progress):
            self.begun += 1
            try:
                progress(0, 1, "searching")
                while not self.free.wait(0.01):
                    announce("iteration 5")
            except ConnectionError:
                self.ended += 1
                raise
            return draft_plan(run)

    made = Search()
    monkeypatch.setattr(live, "make_plan", made)
    monkeypatch.setattr(live, "_OFTEN", 0.01)
    yield made
    made.free.set()


def until(condition):
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise TimeoutError


def test_a_page_that_hangs_up_ends_its_search(server, search):
    connection = http.client.HTTPConnection(*server.server_address, timeout=60)
    connection.request("GET", "/plan")
    response = connection.getresponse()
    assert json.loads(response.readline())["progress"]["what"] == "searching"
    response.close()
    connection.close()
    until(lambda: search.ended == 1)


def test_a_second_tab_is_answered_while_the_first_still_searches(search):
    desk, told = Desk(), []
    first = threading.Thread(target=desk.answer, args=(Question(SETUP), told.append))
    first.start()
    until(lambda: search.begun == 1)
    assert answered(Question(SETUP, "draft"), desk)[-1]["plan"]["preview"] is True
    second = threading.Thread(target=desk.answer, args=(Question(SETUP.changed(epsilon=2.0)), told.append))
    second.start()
    until(lambda: search.begun == 2)  # beside the first
    search.free.set()
    first.join(60)
    second.join(60)
    assert {part["plan"]["promise"] for part in told if "plan" in part} == {"(8, 10⁻⁵)-DP", "(2, 10⁻⁵)-DP"}


def test_a_page_that_leaves_while_it_waits_is_never_searched_for(search, monkeypatch):
    monkeypatch.setattr(live.os, "cpu_count", lambda: 1)
    desk = Desk()
    busy = [threading.Thread(target=desk.answer, args=(Question(SETUP), [].append)) for _ in range(2)]
    for thread in busy:
        thread.start()
    until(lambda: search.begun == 2)
    waits = []

    def leave(message):
        waits.append(message["progress"]["what"])
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        desk.answer(Question(SETUP), leave)
    search.free.set()
    for thread in busy:
        thread.join(60)
    assert waits == ["waiting for the searches of other tabs"]
    assert search.begun == 2


def test_long_searches_say_about_how_long_they_take():
    run = SETUP.changed(sampling="best")
    long = run.changed(examples=50_000, batch_size=16, epochs=10)
    assert live._usual_seconds(SETUP) < live._usual_seconds(run) < live._usual_seconds(long)
    assert Desk()._expected(Question(long)) == pytest.approx(95, rel=0.1)
    assert Desk()._expected(Question(long, "draft")) is None


def test_the_browser_is_opened_only_where_there_is_a_screen(monkeypatch):
    opened, said = [], []
    monkeypatch.setattr(web.webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(web.sys, "platform", "linux")
    monkeypatch.setattr(web.PageServer, "serve_forever", lambda self: None)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for display, browser in (("", True), (":0", False), (":0", True)):
        monkeypatch.setenv("DISPLAY", display)
        web.serve(SETUP, 0, said.append, browser=browser)
    assert [line.split()[0] for line in said] == ["Open", "Open", "Opened"]
    assert len(opened) == 1


def test_a_port_in_use_is_one_sentence(server):
    with pytest.raises(QuellError, match="choose another --port"):
        PageServer(SETUP, server.server_address[1])


def test_interrupting_ends_with_a_clean_message():
    # Background jobs of a shell, which a CI run may be, are started with SIGINT ignored.
    code = "import signal, quell.cli; signal.signal(signal.SIGINT, signal.default_int_handler); quell.cli.main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert "Stopped." in out
