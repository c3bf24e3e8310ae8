"""Which replica has seen the beginning of a text: so that its cached prefix is found again.

A table and a rule, no clock and no network. A prompt goes where the longest beginning of it went
before, unless that replica already does more than its share; then to the one with the least work.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence

_BLOCK = 256  # characters; a page of the cache holds about as many


class PrefixDirectory:
    """Remembers the last `capacity` blocks of text and the replica each went to."""

    def __init__(self, *, capacity: int = 65_536, slack: float = 0.5, spare: int = 4) -> None:
        """A replica is passed over when it holds more than (1 + `slack`) times the mean number of
        requests and `spare` more: a shared prefix must not fill one replica and idle the rest."""
        self._capacity = capacity
        self._slack = slack
        self._spare = spare
        self._owner: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owner)

    def rank(self, text: str, loads: Mapping[str, int]) -> list[str]:
        """Replicas in the order in which to try them; `loads`: requests each one holds."""
        if not loads:
            return []
        by_load = sorted(loads, key=lambda name: (loads[name], name))
        owner = next((o for o in self._owners(text) if o in loads), None)
        if owner is None or loads[owner] > self._limit(loads):
            return by_load
        return [owner, *(name for name in by_load if name != owner)]

    def record(self, text: str, replica: str) -> None:
        """A request with this text went to `replica`."""
        for key in _keys(text):
            self._owner[key] = replica
            self._owner.move_to_end(key)
        while len(self._owner) > self._capacity:
            self._owner.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its cache with it."""
        for key in [key for key, owner in self._owner.items() if owner == replica]:
            del self._owner[key]

    def _owners(self, text: str) -> Sequence[str]:
        """Owners of the beginnings of a text, the longest first."""
        known = [self._owner[key] for key in _keys(text) if key in self._owner]
        return known[::-1]

    def _limit(self, loads: Mapping[str, int]) -> float:
        return (1.0 + self._slack) * sum(loads.values()) / len(loads) + self._spare


def _keys(text: str) -> list[bytes]:
    """One hash for each beginning of whole blocks; a shorter text is one block."""
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, max(len(text) - len(text) % _BLOCK, 1), _BLOCK):
        digest.update(text[start : start + _BLOCK].encode())
        keys.append(digest.digest())
    return keys
