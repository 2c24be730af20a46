"""How batches are formed: a scheme fixes the batches, how often one example takes part, and which accountant is valid.

A scheme is frozen data (`quell.sampling.schemes`); `Batches` turns it into index arrays that are the same on every
worker and can be resumed at any step; `quell.privacy` prices it, looked up by the scheme's type alone. So there is no
way to write down batches of one kind with the guarantee of another.
"""

from quell.sampling.participation import MOST_STEPS, Participation
from quell.sampling.schemes import (
    BEST,
    SCHEMES,
    BallsInBins,
    BMinSep,
    Cyclic,
    CyclicPoisson,
    Poisson,
    Scheme,
    scheme,
    scheme_names,
)
from quell.sampling.stream import Batches, batches

__all__ = [
    "BEST",
    "MOST_STEPS",
    "SCHEMES",
    "BMinSep",
    "BallsInBins",
    "Batches",
    "Cyclic",
    "CyclicPoisson",
    "Participation",
    "Poisson",
    "Scheme",
    "batches",
    "scheme",
    "scheme_names",
]
