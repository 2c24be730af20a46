"""Write docs/api.md: every public name with its signature and docstring, from the code itself.

    python -m tools.api

Public is what `__all__` of the rooms in `ROOMS` names. A test fails where the page
is not up to date, and where a public name or method has no docstring.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOMS = (
    "quell",
    "quell.budget",
    "quell.tuning",
    "quell.torch",
    "quell.torch.losses",
    "quell.torch.huggingface",
    "quell.torch.lightning",
    "quell.jax",
    "quell.noise",
    "quell.auditing",
    "quell.research",
)
MADE_FOR_USERS = {"PrivateOptimizer", "PlannedLoader"}  # by make_private; nobody else passes their arguments
CALLED = {  # what users call, of classes whose other methods are for frameworks
    "quell.torch.optimizer.PrivateOptimizer": (
        "step",
        "zero_grad",
        "averaged",
        "privacy_report",
        "audit",
        "state_dict",
        "load_state_dict",
        "close",
    ),
    "quell.torch.loader.PlannedLoader": ("state_dict", "load_state_dict"),
    "quell.torch.huggingface.PrivateTrainer": ("train", "privacy_report"),
    "quell.torch.lightning.Private": ("privacy_report",),
}
PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def page() -> str:
    """The whole reference as Markdown."""
    parts = ["# API reference", "Made from the docstrings by `make docs`; do not edit."]
    for room in map(import_module, ROOMS):
        parts += [f"## `{room.__name__}`", _text(room)]
        for name in room.__all__:
            parts += _entry(f"{room.__name__}.{name}", getattr(room, name))
    return "\n\n".join(parts) + "\n"


def undocumented() -> list[str]:
    """Public names, and public methods of public classes, that have no docstring of their own."""
    missing = []
    for room in map(import_module, ROOMS):
        for name in room.__all__:
            thing = getattr(room, name)
            members = _members(thing) if inspect.isclass(thing) else ()
            methods = ((f"{name}.{inner}", member) for inner, member in members if not isinstance(member, property))
            missing += [f"{room.__name__}.{path}" for path, each in ((name, thing), *methods) if not _text(each)]
    return missing


def _entry(path: str, thing: Any) -> list[str]:
    parts = [f"### `{path}`", f"```text\n{_signature(path, thing)}\n```", _text(thing)]
    if inspect.isclass(thing):
        for name, member in _members(thing):
            shown = name if isinstance(member, property) else _signature(name, member).replace("\n    ", " ")
            parts.append(f"**`.{shown}`** {_text(member)}".strip())
    return [part for part in parts if part]


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that the class defines itself, in the order of the source."""
    for name, raw in vars(cls).items():
        member = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
        member = property(member.func, doc=member.__doc__) if hasattr(member, "func") else member  # cached_property
        if name.startswith("_") or name not in CALLED.get(f"{cls.__module__}.{cls.__name__}", (name,)):
            continue
        if inspect.isfunction(member) or isinstance(member, property):
            yield name, member


def _signature(path: str, thing: Any) -> str:
    """`name(arguments) -> result`, one argument a line where that is long; without self."""
    name = path.rsplit(".", 1)[-1]
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return f"class {name}({thing.__mro__[1].__name__})"
    if name in MADE_FOR_USERS:
        return f"class {name}"
    signature = inspect.signature(thing)
    arguments = [_plain(each) for each in signature.parameters.values() if each.name not in ("self", "cls")]
    result = None if inspect.isclass(thing) else signature.return_annotation
    plain = signature.replace(parameters=arguments, return_annotation=_Raw(result) if result else signature.empty)
    flat = f"{name}{plain}"
    if len(flat) <= 110 or len(arguments) < 2:
        return flat
    end = f" -> {_Raw(result)}" if result else ""
    pieces = [str(each) for each in arguments]
    kinds = [each.kind for each in arguments]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        pieces.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return "\n".join([f"{name}(", *(f"    {piece}," for piece in pieces), f"){end}"])


class _Raw:
    """An annotation that prints as it is written in the source."""

    def __init__(self, annotation: Any) -> None:
        annotation = getattr(annotation, "__forward_arg__", annotation)  # named tuples wrap what is written
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.annotation is parameter.empty:
        return parameter
    return parameter.replace(annotation=_Raw(parameter.annotation))


def _text(thing: Any) -> str:
    """The docstring, with examples fenced, or nothing where it is inherited or generated by `dataclass`."""
    raw = thing.__doc__ or ""
    if inspect.isclass(thing) and raw.startswith(f"{thing.__name__}("):
        return ""
    text = inspect.cleandoc(raw)
    text = re.sub(r"^(Args|Attributes):\n", r"\1:\n\n", text, flags=re.M)
    text = re.sub(r"^    (\w+(?:, \w+)*): ", lambda found: f"- `{found[1].replace(', ', '`, `')}`: ", text, flags=re.M)
    return re.sub(
        r"^>>> .*\n?(?:.+\n?)*", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text, flags=re.M
    ).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
