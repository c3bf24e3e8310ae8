"""How busy a cycle is, as one value for metrics and for admission control. It knows no request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Counts of now, then totals since the cycle was built."""

    num_waiting: int
    """Requests that have no slot, those sent back among them."""
    num_reading: int
    """Requests whose prompt is being read."""
    num_decoding: int
    max_requests: int
    num_pages: int
    """Pages that can be held."""
    num_free_pages: int
    """Pages that nobody holds and that keep nothing."""
    num_cached_pages: int
    """Pages that nobody holds and that keep words for requests to come, until they are needed."""
    page_size: int
    """Positions of a page."""
    total_prompt_tokens: int
    """Of prompts that were started."""
    total_cached_tokens: int
    """Those among them that the cache knew."""
    total_sent_back: int
    """Times that a request gave its pages to an older one."""
    total_broken_drafts: int
    """Blocks that could not be drawn; after the first one nothing is drafted."""

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self.num_reading + self.num_decoding
