"""PyTorch: a plan's batches and noise in the user's own loop, on any number of GPUs.

`make_private` is the two-line way in; `attach` serves loops that clip by themselves; `CorrelatedNoise` and
`clipped_sum` are their parts. `quell.torch.huggingface` and `quell.torch.lightning` are for those trainers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quell.torch.clipping import clipped_sum
from quell.torch.noise import CorrelatedNoise

if TYPE_CHECKING:
    from quell.adapters.report import PrivacyReport
    from quell.torch.attached import attach
    from quell.torch.augmentation import crop_and_flip
    from quell.torch.batch_norm import replace_batch_norm
    from quell.torch.checkpoints import load_checkpoint, save_checkpoint
    from quell.torch.checks import PlanMismatchWarning
    from quell.torch.engine.graphs import NotRecordedWarning
    from quell.torch.loader import PlannedLoader
    from quell.torch.optimizer import PrivateOptimizer
    from quell.torch.private import make_private
    from quell.torch.probe import UncheckedLossWarning
    from quell.torch.standardised import standardise_convolutions

__all__ = [
    "CorrelatedNoise",
    "NotRecordedWarning",
    "PlanMismatchWarning",
    "PlannedLoader",
    "PrivacyReport",
    "PrivateOptimizer",
    "UncheckedLossWarning",
    "attach",
    "clipped_sum",
    "crop_and_flip",
    "load_checkpoint",
    "make_private",
    "replace_batch_norm",
    "save_checkpoint",
    "standardise_convolutions",
]

# Loaded on first use: they need the accountants, the parts above do not.
_HOMES = {
    "NotRecordedWarning": "quell.torch.engine.graphs",
    "PlanMismatchWarning": "quell.torch.checks",
    "PlannedLoader": "quell.torch.loader",
    "PrivacyReport": "quell.adapters.report",
    "PrivateOptimizer": "quell.torch.optimizer",
    "UncheckedLossWarning": "quell.torch.probe",
    "attach": "quell.torch.attached",
    "crop_and_flip": "quell.torch.augmentation",
    "load_checkpoint": "quell.torch.checkpoints",
    "make_private": "quell.torch.private",
    "replace_batch_norm": "quell.torch.batch_norm",
    "save_checkpoint": "quell.torch.checkpoints",
    "standardise_convolutions": "quell.torch.standardised",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quell.torch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
