"""The API reference is complete, and what the code says today."""

from __future__ import annotations

from importlib import import_module

import pytest

from tools import api

for framework in ("jax", "transformers", "pytorch_lightning"):  # the reference has all of them
    pytest.importorskip(framework)


@pytest.mark.parametrize("room", api.ROOMS)
def test_every_public_name_is_in_the_reference(room):
    module, page = import_module(room), api.PAGE.read_text()
    missing = [name for name in module.__all__ if f"### `{room}.{name}`\n" not in page]
    assert not missing, "run make docs"


def test_every_public_name_and_method_has_a_docstring():
    assert api.undocumented() == []


def test_the_reference_is_up_to_date():
    assert api.PAGE.read_text() == api.page(), "run make docs"


def test_chosen_classes_and_methods_exist():
    assert {name for room in api.ROOMS for name in import_module(room).__all__} >= api.MADE_FOR_USERS
    for path, methods in api.CALLED.items():
        room, _, name = path.rpartition(".")
        assert {found for found, _ in api._members(getattr(import_module(room), name))} == set(methods)


def test_a_name_without_a_docstring_is_noticed(monkeypatch):
    class Bare:
        def method(self) -> None:
            pass

    monkeypatch.setattr("quell.Plan", Bare, raising=False)
    assert api.undocumented() == ["quell.Plan", "quell.Plan.method"]
