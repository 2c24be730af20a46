"""Which steps were released, and a digest of what: in memory, 24 bytes a step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

DIGEST_BYTES: Final = 16
UNKNOWN: Final = bytes(DIGEST_BYTES)  # released, and nobody knows as what, so it can never come again


class Releases:
    """Steps with their digests.

    >>> made = Releases()
    >>> made.note(0, 1, b"sixteen bytes...")
    >>> made.note(1, 5)
    >>> made.released, made.digest(0), made.digest(3) == UNKNOWN, made.digest(5)
    (5, b'sixteen bytes...', True, None)
    """

    def __init__(self) -> None:
        self.released = 0  # one more than the last step
        self._steps, self._digests = array("Q"), bytearray()
        self._unknown: list[range] = []

    def note(self, first: int, until: int, digest: bytes = UNKNOWN) -> None:
        """The steps from `first` to below `until` are released, the last of them with this digest."""
        if digest != UNKNOWN:
            place = bisect_left(self._steps, until - 1)
            self._steps.insert(place, until - 1)
            self._digests[place * DIGEST_BYTES : place * DIGEST_BYTES] = digest
        unknown = range(first, until if digest == UNKNOWN else until - 1)
        if unknown:
            self._unknown.append(unknown)
        self.released = max(until, self.released)

    def digest(self, step: int) -> bytes | None:
        """What the step was released as; None if it was not."""
        if any(step in unknown for unknown in self._unknown):
            return UNKNOWN
        place = bisect_left(self._steps, step)
        if place == len(self._steps) or self._steps[place] != step:
            return None
        return bytes(self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
