"""What can propose tokens in an engine, and the proposer that each needs. It knows no request."""

from functools import partial

from dspark.engine.chain_pass import ChainPass
from dspark.engine.copying import CopyingPass
from dspark.engine.draft_pass import DraftPass
from dspark.engine.prompt_lookup import LookupPass, PromptLookup
from dspark.engine.proposer import Proposer
from dspark.models.chain import ChainDrafter
from dspark.models.kinds import AnyDrafter
from dspark.models.target import Target

DraftSource = AnyDrafter | PromptLookup
"""A drafter of any kind, or none at all: the request's own text."""


def block_size_of(source: DraftSource | None) -> int:
    """K: tokens proposed in a round, at most; 0 without a source."""
    match source:
        case None:
            return 0
        case PromptLookup():
            return source.block_size
        case _:
            return source.config.block_size


def proposer_of(
    source: DraftSource, *, target: Target, num_pages: int, page_size: int, copies: bool
) -> Proposer:
    """The proposer of an engine whose pages have these sizes; `copies`: see `CycleConfig`."""
    if isinstance(source, PromptLookup):
        return LookupPass(source, device=target.device)
    vocab_size = target.spec.vocab_size
    make = (
        partial(ChainPass, source)
        if isinstance(source, ChainDrafter)
        else partial(DraftPass, source)
    )
    drafting: Proposer = make(num_pages=num_pages, page_size=page_size, vocab_size=vocab_size)
    if not copies:
        return drafting
    return CopyingPass(drafting, vocab_size=vocab_size, device=target.device)
