"""What a lookup answers."""

from enum import StrEnum

import msgspec


class LookupOutcome(StrEnum):
    """Why an offer has the size it has (W7). The value is the name that events and metrics carry."""

    #: The offer reaches as far as the pool's longest prefix of this prompt.
    FULL = "full"
    #: It ends within `rewind_tokens` of that prefix: the window pages for a later end are not all there.
    REWOUND = "rewound"
    #: It ends further back than that, where an earlier prompt or answer ended.
    RECOVERED = "recovered"
    #: The pool holds a longer prefix, but at none of its ends all pages of the sliding windows.
    WINDOW_MISS = "window_miss"
    #: Nothing was asked: the local match already reaches the last whole block that may be taken (L1).
    SKIPPED = "skipped"
    #: The pool holds no block beyond the local match.
    FULL_ATTENTION_MISS = "full_attention_miss"
    #: The local match is not on a block boundary, so no block can follow it (L1).
    UNALIGNED = "unaligned"
    #: The pool did not answer within `lookup_deadline_s`.
    DEADLINE = "deadline"
    #: The pool cannot be asked at present, or calls that hang leave no room for a load.
    UNAVAILABLE = "unavailable"
    #: A service of the connector failed, and it goes on without a cache (`on_failure`). Apart from "unavailable", which ends
    #: by itself.
    DEGRADED = "degraded"
    #: As many loads are under way as `max_parked_loads` allows: computing is sooner than waiting for another.
    OVERLOADED = "overloaded"
    #: `max_load_attempts` loads of this request failed: it is computed. Named by what happened and not "exhausted", which
    #: would read as if the pool or memory had run out.
    LOADS_FAILED = "loads_failed"
    #: This connector's role does not read, or the engine asked for this request not to (L7).
    NOT_READING = "not_reading"
    #: The prompt has media whose digests nobody gave: nothing is read or saved for it (K5).
    MEDIA_UNKNOWN = "media_unknown"
    #: The request has no salt, and `require_salt` asks for one: nothing is read or saved for it (X3).
    UNSALTED = "unsalted"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Whole blocks that the connector promises beyond the engine's own local match. Taken up with `Request.reserve()`.

    An offer holds no page and costs nothing to drop. It stays valid until the pages that it names are evicted; a load finds
    out.
    """

    request_id: str
    #: The incarnation that asked. An offer of an earlier one is refused.
    incarnation: int
    #: Tokens of the engine's own local match, where the offer starts.
    local_tokens: int
    #: Tokens offered beyond `local_tokens`, a multiple of T. 0 is a normal answer.
    tokens: int
    outcome: LookupOutcome
    #: T, so that an offer can be cut without asking for the layout.
    tokens_per_block: int
    #: With window groups: where the request can resume, in tokens beyond `local_tokens`, as far as this lookup learnt.
    #: Ascending; the last is `tokens`, and there is none where nothing is offered. None without window groups.
    ends: tuple[int, ...] | None = None

    def at_most(self, tokens: int) -> "Offer":
        """The part of this offer that fits in `tokens` tokens; for an engine that cannot take it all. Asks nobody.

        Without window groups every prefix of an offer is itself resumable, so it is cut to whole blocks. With them a shorter
        prefix needs other window pages, which may never have been stored: it is cut to the latest end that this lookup knows
        to be complete, and to nothing if none is that short (W8).
        """
        if self.ends is None:
            cut = max(0, min(self.tokens, tokens) // self.tokens_per_block * self.tokens_per_block)
            return msgspec.structs.replace(self, tokens=cut)
        ends = tuple(end for end in self.ends if end <= tokens)
        return msgspec.structs.replace(self, tokens=ends[-1] if ends else 0, ends=ends)
