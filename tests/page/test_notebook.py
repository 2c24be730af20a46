"""Plans, pictures and progress inside a notebook."""

from __future__ import annotations

import html
import sys
import types

import numpy as np
from rich.console import Console

import quell
from quell.progress import announce
from quell.run import Promise
from quell.show import bar, plots
from quell.show.notebook import framed
from quell.tuning import TuningPlan
from quell.tuning.plan import Way


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(plan):
    shown = plan._repr_html_()
    frame, _, rest = shown.partition("</iframe>")
    assert html.unescape(frame.split('srcdoc="')[1].split('"')[0]) == plan.page()
    assert 'sandbox="allow-scripts allow-downloads"' in frame  # no allow-same-origin: it cannot reach the notebook
    assert html.unescape(rest).count(str(plan)) == 1
    assert '"><script' not in framed('"><script>alert(1)</script>', "</pre><script>alert(1)</script>")
    assert "<script>" not in framed('"><script>alert(1)</script>', "</pre><script>alert(1)</script>")


def test_comparisons_are_shown_as_text():
    ways = (Way("geometric", 10.0, 5.0, 1.4, 0.1), Way("all", 5, 3.0, 2.2, 0.0))
    shown = TuningPlan(Promise(8.0, 1e-5), 5, (), ways)._repr_html_()
    assert shown.startswith("<pre>")
    assert "may be released" in shown


def test_pictures_are_shown_by_notebooks():
    picture = plots.draw_audit(np.arange(5.0), np.arange(5.0), "an audit")
    assert picture._repr_png_().startswith(b"\x89PNG")


class Display:
    """IPython.display, as far as it is used."""

    def __init__(self):
        self.shown, self.updates = [], []

    def display(self, content, raw, display_id):
        assert raw
        assert display_id is True
        self.shown.append(content)
        return types.SimpleNamespace(update=lambda content, raw: self.updates.append(content))


def test_a_bar_in_a_notebook_is_one_output_that_is_updated_and_emptied(monkeypatch):
    notebook = Display()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    with bar.progress_bar(Console(force_jupyter=True)) as advance:
        for done in range(1000):
            advance(done, 1000, "<b>")
            announce("band: iteration 3")
    assert len(notebook.shown) == 1
    assert 1 < len(notebook.updates) < 100
    assert notebook.updates[-1] == {"text/plain": "", "text/html": ""}
    assert "&lt;b&gt;" in notebook.updates[0]["text/html"]


def test_a_bar_says_nothing_where_it_would_be_lines_in_a_file(capsys):
    quell.plan(examples=200, batch_size=20, epochs=1, epsilon=8, delta=1e-3, memory=0, sampling="cyclic", progress=True)
    assert capsys.readouterr() == ("", "")
