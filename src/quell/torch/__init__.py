"""PyTorch: a plan's batches and noise in the user's own loop, on any number of GPUs.

`make_private` is the two-line way in; `CorrelatedNoise` and `clipped_sum` are its parts, for other trainers. Opacus is
imported by `make_private` alone, and only for the ways of clipping that are Opacus's.
"""

from quell.torch.clipping import clipped_sum
from quell.torch.noise import CorrelatedNoise

__all__ = ["CorrelatedNoise", "clipped_sum"]
