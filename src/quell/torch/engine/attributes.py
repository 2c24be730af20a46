"""What a model's modules hold in attributes: was something set to something else?

What a module computes can depend on it (`model.phase = 2`), and neither its arguments nor its weights show that.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn

from quell.torch.engine.base import StandIn

PLAIN = (bool, int, float, str, type(None))  # what can be compared with ==
_SWITCHES = (bool, int, str, type(None))
_VALUES = {False: 16, True: 4}  # of one attribute that are told apart; it counts something if the model sets more
_LOOKS = 20  # calls after a change in which it is found out whether the model itself sets attributes
_DEPTH = 2  # of lists, mappings and objects in others
_MISSING = object()
_OWN = frozenset(vars(nn.Module()))


class Attributes:
    """Looks at all of them, which takes about half a microsecond for each module.

    `changes` counts the looks that found what the model did not set itself, `own_changes` those that found what it
    did. Replaced submodules count too. Modes (`training`) do not, nor what is changed inside a list or another object.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changes = self.own_changes = 0
        self.last = ""  # the name of one that was set
        self._model = model
        self._named: list[tuple[str, nn.Module]] = []
        self._seen: list[dict[str, Any]] = []
        self._children: list[tuple[nn.Module, list[Any]]] = []
        self._calls, self._sets_own = 0, False
        self._kinds: dict[str, set[Any]] = defaultdict(set)
        self._counts: Counter[str] = Counter()
        self._ways: dict[str, Any] = {}

    def before_call(self) -> None:
        """What changed since the last call was set by somebody else. The first call only remembers what there is."""
        if not self._named:
            self._remember_all()
        elif self.look():
            self.changes += 1
            self._calls = 0

    def after_call(self) -> None:
        """What changed in the call was set by the model. Most models never do that, and are not looked at for long."""
        self._calls += 1
        if (self._sets_own or self._calls <= _LOOKS) and self.look(by_model=True):
            self._sets_own = True
            self.own_changes += 1

    def look(self, by_model: bool = False) -> bool:
        """Whether anything was set to something else since the last look."""
        found: dict[str, Any] = {}
        for place, ((name, module), seen) in enumerate(zip(self._named, self._seen, strict=True)):
            own = vars(module)
            if len(own) == len(seen) and all(map(is_, own.values(), seen.values())):
                continue
            for key in {**seen, **own}:
                value = own.get(key, _MISSING)
                if key != "training" and not isinstance(value, StandIn) and not _same(seen.get(key, _MISSING), value):
                    found[f"{name}.{key}" if name else key] = value
            self._seen[place] = _remembered(own)
        found |= self._replaced()
        for name, value in found.items():
            self.last, self._ways[name] = name, self._way(name, _kind(value), _VALUES[by_model])
        return bool(found)

    def ways(self) -> tuple[tuple[str, Any], ...]:
        """All that were ever set, and what each is now."""
        return tuple(self._ways.items())

    def _replaced(self) -> dict[str, Any]:
        """Submodules that took the place of others."""
        found: dict[str, Any] = {}
        for module, children in self._children:
            now = module._modules
            if len(now) != len(children) or not all(map(is_, now.values(), children)):
                found |= {f"{type(module).__name__}.{name}": child for name, child in now.items()}
        if found:
            self._remember_all()
        return found

    def _remember_all(self) -> None:
        self._named = list(self._model.named_modules())
        self._seen = [_remembered(vars(module)) for _, module in self._named]
        self._children = [(module, list(module._modules.values())) for _, module in self._named if module._modules]

    def _way(self, name: str, kind: Any, most: int) -> Any:
        """The kind of value, as long as there are few; then how often it was set, told apart at 8, 16, 32, ..."""
        self._counts[name] += 1
        if len(self._kinds[name]) <= most:
            self._kinds[name].add(kind)
        return kind if len(self._kinds[name]) <= most else self._counts[name].bit_length()


class Contents:
    """What lists, mappings and plain objects hold that modules have as attributes, such as a configuration."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[int, tuple[Any, list[Any]]] = {}
        for module in model.modules():
            self._remember((value for name, value in vars(module).items() if name not in _OWN), _DEPTH)

    def changed(self) -> bool:
        """Whether anything in them is something else now."""
        return any(not _all_same(seen, _contents(value)) for value, seen in self._seen.values())

    def _remember(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if _has_contents(value) and id(value) not in self._seen:
                self._seen[id(value)] = value, list(_contents(value))
                if depth:
                    self._remember(self._seen[id(value)][1], depth - 1)


def _has_contents(value: Any) -> bool:
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value):
        return False
    return isinstance(value, (dict, list, set, deque)) or hasattr(value, "__dict__")


def _contents(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, set, deque)) else vars(value).values()


def _all_same(before: Collection[Any], now: Collection[Any]) -> bool:
    return len(before) == len(now) and (all(map(is_, before, now)) or all(map(_same, before, now)))


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, PLAIN) and before == now)


def _remembered(own: dict[str, Any]) -> dict[str, Any]:
    """A copy, without what would keep a pass's activations in memory: that counts as changed."""
    return {name: _MISSING if isinstance(v, Tensor) and v.grad_fn is not None else v for name, v in own.items()}


def _kind(value: Any) -> tuple[Any, ...]:
    """A switch by its value, a tensor by how many dimensions it has, all else by its type."""
    if isinstance(value, Tensor):
        return type(value), value.dim()
    return (type(value), value) if isinstance(value, _SWITCHES) else (type(value),)
