"""No price takes work without a bound, however far the noise is from what the promise needs."""

from __future__ import annotations

import numpy as np
import pytest

from quell.privacy import importance
from quell.privacy.bin_pair import BinPair
from quell.privacy.bins import Bins
from quell.privacy.mixture import BinAccountant

UNLIKE = BinAccountant(Bins(np.diag(np.geomspace(0.02, 1.0, 25))))


@pytest.mark.parametrize(("sigma", "epsilon"), [(2.0, 2.6), (4.0, 7.0)])
def test_tuples_that_are_hardly_ever_accepted_are_not_drawn(sigma, epsilon, monkeypatch):
    """A certificate asked for 16,384 accepted tuples, of which one in 10⁸ is accepted here: it never ended."""
    drawn = 0
    real = BinPair._tuples

    def counted(self, tilt, count, random):
        nonlocal drawn
        drawn += count * self.width * max(1, tilt.extra)
        assert drawn < 0.5 * importance._WORK
        return real(self, tilt, count, random)

    monkeypatch.setattr(BinPair, "_tuples", counted)
    found, certificate = UNLIKE.certified_delta(sigma, epsilon, comparisons=1)
    assert 0 < found < 1e-15
    assert certificate.failure == 0, "proven without draws"


def test_no_draws_are_made_where_what_is_proven_without_them_is_smaller():
    """And draws are made where they pay."""
    scouted = UNLIKE._scouted(2.0, 2.6, 1e-12)
    assert scouted.draws == (0,)
    assert scouted.expected_upper == scouted.free
    few = UNLIKE._scouted(0.6, 1.0, 1e-12)
    assert few.expected_upper < 0.5 * few.free
    assert all(few.draws)
