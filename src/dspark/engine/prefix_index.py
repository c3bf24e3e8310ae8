"""Which pages hold which words: full pages are known by all tokens that lead to their end.

It knows token ids and page numbers; who holds a page is the cache's matter (`kv_cache`).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def extend_names(
    names: list[bytes], token_ids: Sequence[int], *, page_size: int, num_ahead: int
) -> None:
    """Append the names of those full pages that every pass behind the last token can use.

    A page's name is a digest of the name before it and of its tokens, so that equal names mean
    equal words from the start; 256 bits, because a collision would answer one user with another
    one's text. The page of the last token is left out even if full: that token is always run.
    `num_ahead`: tokens behind a page that what is kept of the page depends on.
    """
    for page in range(len(names), (len(token_ids) - 1) // page_size):
        start = page * page_size
        ids = array("q", token_ids[start : start + page_size + num_ahead])
        before = names[-1] if names else b""
        names.append(hashlib.sha256(before + ids.tobytes()).digest())


class PrefixIndex:
    """Named pages; those that nobody holds are forgotten first come, first gone."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Named pages that nobody holds."""
        return len(self._idle)

    def pages(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        found = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def is_idle(self, page: int) -> bool:
        """Whether a page is named and nobody holds it."""
        return page in self._idle

    def is_named(self, page: int) -> bool:
        """Whether a page holds known words."""
        return page in self._names

    def add(self, page: int, name: bytes) -> None:
        """A held page is full. Of two with equal words the first stays known."""
        if name not in self._pages:
            self._pages[name] = page
            self._names[page] = name

    def hold(self, page: int) -> None:
        """Somebody takes a known page."""
        self._idle.pop(page, None)

    def rest(self, page: int) -> bool:
        """The last holder of a page let go; whether the page is kept for its words."""
        if page not in self._names:
            return False
        self._idle[page] = None
        return True

    def forget_oldest(self) -> int:
        """The page that rested longest, without a name now: it may be written."""
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._names.pop(page)]
        return page

    def check(self) -> None:
        """The invariants: names and pages match one to one, only named pages rest."""
        assert {name: page for page, name in self._names.items()} == self._pages
        assert self._idle.keys() <= self._names.keys()
