"""JAX: a plan's noise as an optax transformation, clipped gradient sums by vmap, and padded batches.

`privatize` goes before any optax optimizer; `clipped_grad` makes the sums that it takes; `batches` gives the plan's
batches in one shape; `check` raises what a compiled step could not.
"""

from quell.jax.batches import PaddedBatches, batches
from quell.jax.clipping import clipped_grad
from quell.jax.private import Private, privatize
from quell.jax.state import NoiseState, check

__all__ = ["NoiseState", "PaddedBatches", "Private", "batches", "check", "clipped_grad", "privatize"]
