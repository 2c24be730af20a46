"""δ by plain simulation of the mechanism, sharing no code with the accountants: the oracle of these tests.

One example adds C·x to the noise σ·ξ, x its participation pattern times a unit gradient. Patterns come either from a
list with probabilities or from the batches of a real sampler, where every example is one draw of a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quell.schemes import Batches


@dataclass
class Patterns:
    """(m, n) zero-one patterns and their probabilities."""

    rows: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def of_bins(cls, steps, bins):
        rows = np.array([(np.arange(steps) % bins == j) for j in range(bins)], dtype=float)
        return cls(rows, np.full(bins, 1 / bins))

    @classmethod
    def of_sampler(cls, scheme, examples=200_000, key=bytes(range(32))):
        """How often each pattern occurs among the examples of a real stream."""
        taken = np.zeros((examples, scheme.steps), dtype=np.uint8)
        for step, batch in enumerate(Batches(scheme, examples, key)):
            taken[batch, step] = 1
        rows, counts = np.unique(taken, axis=0, return_counts=True)
        return cls(rows.astype(float), counts / examples)

    @classmethod
    def of_chain(cls, steps, separation, rate):
        """All patterns of the b-min-sep chain with their exact probabilities, by recursion."""
        found = {}

        def extend(step, taken, probability):
            if step >= steps:
                key = tuple(taken)
                found[key] = found.get(key, 0.0) + probability
                return
            extend(step + 1, taken, probability * (1 - rate))
            extend(step + separation, [*taken, step], probability * rate)

        stationary = 1 + (separation - 1) * rate
        extend(0, [], 1 / stationary)
        for wait in range(1, separation):
            extend(wait, [], rate / stationary)
        rows = np.zeros((len(found), steps))
        for row, taken in enumerate(found):
            rows[row, list(taken)] = 1.0
        return cls(rows, np.array(list(found.values())))


def losses(matrix, patterns, sigma, draws, seed=0):
    """ln dP/dQ at draws from P and at draws from Q."""
    random = np.random.default_rng(seed)
    means = patterns.rows @ matrix.T
    chosen = random.choice(len(means), size=draws, p=patterns.probabilities)
    noise = sigma * random.standard_normal((2, draws, matrix.shape[0]))
    energies = np.sum(means**2, axis=1)

    logs = np.log(patterns.probabilities) - energies / (2 * sigma**2)

    def loss(outputs):
        parts = np.array_split(outputs, max(1, len(outputs) * len(means) // 2**22))
        return np.concatenate([log_sum(part @ (means.T / sigma**2) + logs) for part in parts])

    return loss(means[chosen] + noise[0]), loss(noise[1])


def log_sum(values):
    """ln of the sum of exponentials of every row, four times as fast as scipy's; overwrites its argument."""
    top = values.max(axis=1)
    values -= top[:, None]
    np.exp(values, out=values)
    return top + np.log(values.sum(axis=1))


def simulated_delta(matrix, patterns, sigma, epsilon, draws=200_000, seed=0):
    """{direction: (δ, standard error)}."""
    with_example, without = losses(matrix, patterns, sigma, draws, seed)
    values = {
        "remove": -np.expm1(np.minimum(epsilon - with_example, 0.0)),
        "add": -np.expm1(np.minimum(epsilon + without, 0.0)),
    }
    return {way: (value.mean(), value.std() / np.sqrt(draws)) for way, value in values.items()}


def agrees(certificate, simulated, errors=4.5):
    """Whether the bracket and the larger simulated δ fit together."""
    delta, error = max(simulated.values())
    return certificate[0] - errors * error <= delta <= certificate[1] + errors * error
