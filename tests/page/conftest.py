"""One small plan and one browser, shared by the tests of the page."""

from __future__ import annotations

import threading

import pytest

import quell
from quell.planning import Plan, Prices
from quell.run import Run
from quell.serve.server import PageServer

from .browser import Browser, chromium


@pytest.fixture(scope="session")
def plan() -> Plan:
    return quell.plan(examples=2000, batch_size=100, epochs=4, epsilon=4, delta=1e-5, momentum=0.9, sampling="cyclic")


@pytest.fixture(scope="session")
def amplified() -> Plan:
    """One certified mechanism, and DP-SGD with noise that is only estimated."""
    run = Run.from_data(examples=100, batch_size=20, epochs=4, epsilon=4.0, delta=1e-3, sampling="balls_in_bins")
    prices = Prices(run)
    return Plan(run, (prices.price("bisr", bands=2),), 0, estimates=(prices.dpsgd,))


@pytest.fixture(scope="session")
def chrome(tmp_path_factory):
    program = chromium()
    if program is None:
        pytest.skip("no Chromium found: apt-get install chromium, or set QUELL_CHROMIUM to one (see CONTRIBUTING.md)")
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def browser(chrome):
    """The browser, with a window of the usual size and nothing to complain about."""
    chrome.look()
    chrome.complaints.clear()
    return chrome


@pytest.fixture(scope="session")
def pages(plan, amplified, tmp_path_factory):
    """The pages of both plans, by name."""
    folder = tmp_path_factory.mktemp("pages")
    for name, each in {"plan": plan, "amplified": amplified}.items():
        each.write_page(folder / f"{name}.html")
    return {path.stem: path.as_uri() for path in folder.iterdir()}


@pytest.fixture
def report(browser, pages):
    browser.open(pages["plan"])
    return browser


@pytest.fixture(scope="session")
def address():
    run = Run.from_data(examples=2000, batch_size=128, epochs=2, epsilon=8.0, delta=1e-5, sampling="cyclic")
    server = PageServer(run, 0, usual_delta=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server.url
    server.shutdown()
    server.server_close()
    thread.join()
