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
from quell.planning import Prices
from quell.progress import announce
from quell.run import Run
from quell.serve import desk as live
from quell.serve.desk import Desk, Question, SupersededError, controls, draft_plan, read_question
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


def test_a_plan_is_json(server):
    status, headers, body = ask(server, "/plan?kind=draft&epsilon=2", **{"Sec-Fetch-Site": "same-origin"})
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert "Target: (2, 10⁻⁵)" in json.loads(body)["plan"]["setup"]


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
        ("kind=other", "must be draft or full"),
        ("&".join(f"x{i}=1" for i in range(100)), "must have the form"),
    ],
)
def test_out_of_range_is_one_sentence(server, query, message):
    status, _, body = ask(server, f"/plan?{query}")
    assert status == 400
    assert message in json.loads(body)["error"]


def test_an_unforeseen_failure_is_json_too(server, monkeypatch, capsys):
    monkeypatch.setattr(live, "draft_plan", lambda run: 1 / 0)
    status, _, body = ask(server, "/plan?kind=draft")
    assert status == 500
    assert "ZeroDivisionError" in json.loads(body)["error"]
    assert "Traceback" in capsys.readouterr().err


def test_a_question_changes_only_what_it_names():
    question = read_question("epsilon=3&memory=unlimited&page=abc&kind=draft", SETUP)
    assert question == Question(SETUP.changed(epsilon=3.0, memory=None), True, "abc")


def test_every_slider_stands_at_its_value_and_every_stop_is_allowed():
    for control in controls(SETUP.changed(epsilon=7.7, memory=None, batch_size=100)):
        assert control["value"] in control.get("stops", control.get("options", [control["value"]]))
        for stop in control.get("stops", []):
            if control["name"] != "batch_size" or stop <= SETUP.examples:
                read_question(f"{control['name']}={stop}", SETUP)


def test_a_draft_is_a_sound_plan_under_fixed_batches():
    draft = draft_plan(SETUP.changed(sampling="best", memory=0, draws=1))
    assert draft.mechanism.guarantee.sampling == "cyclic"
    assert draft.mechanism.name == "identity"
    assert draft_plan(SETUP).mechanism.rmse < draft.mechanism.rmse


def test_a_preview_compares_with_the_same_dpsgd_as_the_full_plan():
    run = SETUP.changed(sampling="best")
    preview = Desk().answer(Question(run, True, "a"))
    assert preview["baseline"]["sampling"] == "poisson"
    assert preview["baseline"]["rmse"] == Prices(run).dpsgd.rmse


def test_only_the_latest_question_of_a_page_is_answered(monkeypatch):
    started, proceed, seen = threading.Event(), threading.Event(), []

    def slow(run):
        seen.append(run.epsilon)
        started.set()
        proceed.wait(30)
        announce("still searching")  # where a search hears that nobody waits for it
        return run

    monkeypatch.setattr(live, "draft_plan", slow)
    monkeypatch.setattr(live, "answers", lambda run, thorough, prices: None)
    monkeypatch.setattr(live, "page_content", lambda run, _, thorough: {"epsilon": run.epsilon})
    desk = Desk()
    outcomes: dict[float, dict | None] = {}

    def put(epsilon, page):
        try:
            outcomes[epsilon] = desk.answer(Question(SETUP.changed(epsilon=epsilon), True, page))
        except SupersededError:
            outcomes[epsilon] = None

    def after(number):  # the desk has handed out so many tickets
        while desk._tickets.__reduce__()[1][0] < number:
            started.wait(0.01)

    threads = []
    for number, (epsilon, page) in enumerate([(1.0, "a"), (2.0, "a"), (3.0, "b"), (4.0, "a")], start=1):
        threads.append(threading.Thread(target=put, args=(epsilon, page)))
        threads[-1].start()
        after(number)
        if number == 1:
            started.wait(30)
    proceed.set()
    for thread in threads:
        thread.join(30)
    assert outcomes == {1.0: None, 2.0: None, 3.0: {"epsilon": 3.0}, 4.0: {"epsilon": 4.0}}
    assert sorted(seen) == [1.0, 3.0, 4.0]  # the second was never begun


def test_a_port_in_use_is_one_sentence(server):
    with pytest.raises(QuellError, match="choose another --port"):
        PageServer(SETUP, server.server_address[1])


def test_interrupting_ends_with_a_clean_message():
    # Background jobs of a shell, which a CI run may be, are started with SIGINT ignored.
    code = "import signal, quell.cli; signal.signal(signal.SIGINT, signal.default_int_handler); quell.cli.main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert "Stopped." in out
