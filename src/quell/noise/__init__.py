"""Noise: the rows of C⁻¹Z, made where the gradients live, the same on every device and for every world size."""

from quell.noise.key import Key, SeededKeyWarning
from quell.noise.layout import Shard
from quell.noise.ledger import Ledger
from quell.noise.spec import NoiseSpec
from quell.noise.stream import NoiseStream, UnrecordedKeyWarning

__all__ = ["Key", "Ledger", "NoiseSpec", "NoiseStream", "SeededKeyWarning", "Shard", "UnrecordedKeyWarning"]
