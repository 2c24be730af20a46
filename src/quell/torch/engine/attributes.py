"""The attributes of a model's modules: was one of them set to something else?

What a module computes can depend on them (`model.phase = 2`), and neither its arguments nor its weights show that.
"""

from __future__ import annotations

from collections import defaultdict
from operator import is_
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
_SWITCHES = (bool, int, str, type(None))
_COUNTS = 4  # an attribute with more values than that counts something, or follows a schedule
_MISSING = object()


class Attributes:
    """Looks at all of them: a microsecond for each module."""

    def __init__(self, model: nn.Module) -> None:
        self.changes = 0  # how often a look found that somebody has set some
        self.last = ""  # the name of one of those
        self._named = list(model.named_modules())
        self._seen = [dict(vars(module)) for _, module in self._named]
        self._kinds: dict[str, list[Any]] = defaultdict(list)

    def look(self, by_model: bool = False) -> bool:
        """Whether one was set to something else since the last look, by the model itself or by somebody else.

        Modes (`training`), and lists that are changed in place, do not count.
        """
        found = {}
        for place, ((name, module), seen) in enumerate(zip(self._named, self._seen, strict=True)):
            own = vars(module)
            if len(own) == len(seen) and all(map(is_, own.values(), seen.values())):
                continue
            for key in {**seen, **own}:
                value = own.get(key, _MISSING)
                if key != "training" and not _same(seen.get(key, _MISSING), value):
                    found[f"{name}.{key}" if name else key] = value
            self._seen[place] = dict(own)
        for name, value in found.items():
            self._remember(name, _kind(value))
        if found and not by_model:
            self.changes, self.last = self.changes + 1, next(iter(found))
        return bool(found)

    def ways(self) -> list[tuple[str, Any]]:
        """Those that were ever set, and what kind of value each has now; without those that count something."""
        return [(name, kinds[-1]) for name, kinds in self._kinds.items() if len(kinds) <= _COUNTS]

    def _remember(self, name: str, kind: Any) -> None:
        kinds = self._kinds[name]
        if len(kinds) <= _COUNTS:
            self._kinds[name] = [known for known in kinds if known != kind] + [kind]


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, PLAIN) and before == now)


def _kind(value: Any) -> tuple[Any, ...]:
    """A switch by its value, a tensor by how many dimensions it has, all else by its type."""
    if isinstance(value, Tensor):
        return type(value), value.dim()
    return (type(value), value) if isinstance(value, _SWITCHES) else (type(value),)
