"""The log of a training run: what may be written down about every few steps, where, and how it is read again."""

from quell.watching.log import Log

__all__ = ["Log"]
