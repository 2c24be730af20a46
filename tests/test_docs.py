"""Documentation that shows something must show what really happens.

Every `$ command` in a ```console block runs. The output lines shown must be its real output from the first to the last;
"..." stands for lines left out. Every ```python block runs top to bottom, one namespace per page. Links and their
anchors lead somewhere, and every page is in the navigation of the site (`make docs` checks more, with MkDocs).
"""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quell
from quell import cli
from tools import site

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    found = []
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)):
            found.append(pytest.param(page, text, id=f"{page.name}-{number}"))
    return found


def shown_lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def require_shown(expected: list[str], real: list[str], page: str) -> None:
    """Every line of `expected` follows the one before it in `real`, unless "..." stands between them."""
    place, skipping = 0, False
    for line in expected:
        if line == "...":
            skipping = True
            continue
        if skipping:
            assert line in real[place:], f"{page} shows {line!r}, which is not printed"
            place = real.index(line, place)
        assert real[place : place + 1] == [line], f"{page} shows {line!r} where {real[place : place + 1]} is printed"
        place, skipping = place + 1, False
    assert skipping or place == len(real), f"{page} leaves out {real[place]!r}: write ... there"


@pytest.mark.parametrize(("page", "text"), blocks("console"))
def test_console_blocks_show_real_output(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for session in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = session.replace("\\\n", " ").partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "quell"
        result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        require_shown(shown_lines(expected), shown_lines(result.output), page.name)


SLOW = (
    "jax.md",
    "from-jax-privacy.md",
    "noise.md",
    "from-opacus.md",
    "lora.md",
    "report.md",
    "trainers.md",
    "auditing.md",
    "planner.md",
)  # which import or compile for long


SHARED = ("pytorch.md",)  # which plan the same run as the README, and are run with it


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in SLOW else ())
        for page in PAGES
        if page.name not in SHARED
    ],
)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name != "README.md":
        run(page)
        return
    monkeypatch.setattr(quell, "plan", lru_cache(quell.plan))
    for each in (page, *(ROOT / "docs" / name for name in SHARED)):
        run(each)
    assert quell.plan.cache_info().hits


def test_the_pytorch_page_names_the_oldest_version_that_is_installed():
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"PyTorch, {oldest} or newer" in (ROOT / "docs" / "pytorch.md").read_text()


def run(page: Path) -> None:
    namespace: dict = {}
    texts = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    if any("import jax" in text for text in texts):
        pytest.importorskip("jax")
    if any("import jax_privacy" in text for text in texts):
        pytest.importorskip("jax_privacy")
    for text in texts:
        exec(compile(text, str(page), "exec"), namespace)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in site.pages() if page.suffix == ".md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for label, target, anchor in site.LINK.findall(site.without_code(page.read_text())):
        path = (page.parent / target).resolve()
        assert path.exists(), f"{label} leads to {target}"
        assert not anchor or anchor[1:] in anchors(path), f"{label} leads to {target}{anchor}"


def test_the_map_of_the_code_names_files_and_functions_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    sources = {path: path.read_text() for room in ("src/quell", "tests") for path in (ROOT / room).rglob("*.py")}
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert any(f"/{path}".endswith(f"/{name}") for path in sources), name
    for owner, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", page):
        assert any(f"class {owner}" in text and f"def {method}(" in text for text in sources.values()), (owner, method)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(set(named))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(named)
    assert all(name in map(site.place, site.pages()) for name in named)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
