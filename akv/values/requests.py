"""What an engine tells the connector about its requests, and what it is told when work for them ended."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from akv.values.messages import LoadState, PagesPerGroup, PagesReleased

if TYPE_CHECKING:
    from akv.request import Request


class Scheduled(msgspec.Struct, frozen=True, kw_only=True):
    """One request's part in one pass of the engine, as `Connector.plan_pass()` takes it.

    `msgspec` constructors check nothing (the connector does, in `plan_pass`): types here are a promise of the caller.
    """

    request: "Request"
    #: Tokens whose KV lies in the request's pages before this pass: computed, matched locally, or loaded and LOADED.
    computed_before: int
    #: Tokens that this pass computes, draft tokens left out.
    tokens: int
    #: Draft tokens that this pass computes on top; they are never published before they are confirmed.
    draft_tokens: int = 0
    #: The request's page table for each layer group: entry i is the page of block i, -1 (`akv.NO_PAGE`) for none.
    pages: Sequence[Sequence[int]]


class LoadCompleted(msgspec.Struct, frozen=True, kw_only=True):
    """From `Connector.completed()`: a reservation reached its terminal state, its pages are the engine's again but for those
    that it names as quarantined.
    """

    request_id: str
    #: An engine ignores a completion whose incarnation is not the request's present one (D8).
    incarnation: int
    state: LoadState
    #: Tokens now in the pages, counted from the local match. 0 unless LOADED.
    tokens: int = 0
    #: Why it failed, one word. Empty unless FAILED.
    reason: str = ""
    #: Pages that stay the connector's until `PagesReleased` names them: a store call may still write them (D2). Always empty
    #: if LOADED, and for engines that did not declare `keeps_quarantined_pages`.
    quarantined: PagesPerGroup = ()


class SavesCompleted(msgspec.Struct, frozen=True, kw_only=True):
    """From `Connector.completed()`: a request ended, its pages are the engine's again (S7) but for those in quarantine."""

    request_id: str
    incarnation: int
    #: Blocks of this life that were stored, and that the pool did not take.
    stored_blocks: int
    refused_blocks: int
    #: Pages that stay the connector's until `PagesReleased` names them: a store call still touches them (D6).
    quarantined: PagesPerGroup = ()


Completion = LoadCompleted | SavesCompleted | PagesReleased
