"""The compiled loop of `quell.algebra.descent`, in which searches with many unknowns would spend half their time."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from quell.algebra._compile import compiled


@compiled()
def add_scaled(out, factor, values, other):  # type: ignore[no-untyped-def]
    """out += factor·values; returns out·other, by four sums side by side: an order that no thread changes."""
    a = b = c = d = 0.0
    whole = out.size // 4 * 4
    for k in range(0, whole, 4):
        out[k] += factor * values[k]
        out[k + 1] += factor * values[k + 1]
        out[k + 2] += factor * values[k + 2]
        out[k + 3] += factor * values[k + 3]
        a += out[k] * other[k]
        b += out[k + 1] * other[k + 1]
        c += out[k + 2] * other[k + 2]
        d += out[k + 3] * other[k + 3]
    for k in range(whole, out.size):
        out[k] += factor * values[k]
        a += out[k] * other[k]
    return (a + b) + (c + d)
