"""Numerics that know nothing of privacy: power series, banded factors, sums of exponentials, descent."""
