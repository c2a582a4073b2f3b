"""How far a request's KV may be published after a pass (S1, S12)."""

import operator
from typing import SupportsIndex

from akv.errors import EngineContractError


def savable_blocks(computed_before: int, honoured_restore_this_pass: int, scheduled: int, tokens_per_block: int) -> int:
    """Blocks [0, result) hold computed KV once this pass ended, and only they may be saved (S1). All arguments in tokens.

    `computed_before` counts the local match and the loads that are LOADED and not what this pass restores, which is
    `honoured_restore_this_pass` (0 when loads are asynchronous); `scheduled` leaves draft tokens out. Pages that the engine
    allocated ahead, and the partial last block, hold nothing that another server could use.
    """
    return (computed_before + honoured_restore_this_pass + scheduled) // tokens_per_block


def closing_blocks(computed: int, tokens_per_block: int) -> int:
    """The chain length p at which a finished sequence closes: its whole computed blocks (S12).

    `computed` counts tokens that have KV. The last sampled token has none: it was never fed back.
    """
    return computed // tokens_per_block


#: Numbers in messages are 64 bits wide.
_LARGEST = 2**63 - 1


def whole_number(request_id: str, name: str, number: object) -> int:
    """A number that an engine gives, as a plain int, numpy's integers included, since it travels in messages.

    Raises EngineContractError naming the request and the number.
    """
    # Plain ints first: asking what is a SupportsIndex takes longer than all the rest of a request's part in a pass.
    if type(number) is int or (isinstance(number, SupportsIndex) and not isinstance(number, bool)):
        plain = operator.index(number)
        if -_LARGEST <= plain <= _LARGEST:
            return plain
        raise EngineContractError(f"request {request_id!r}: {name} is outside the range of int64")
    raise EngineContractError(f"request {request_id!r}: {name} is an integer, not a {type(number).__name__}")


def check_scheduled(request_id: str, computed_before: int, tokens: int, draft_tokens: int) -> None:
    """Refuse one request's part of a pass that cannot be true: each number counts tokens from 0.

    A part that reaches beyond the confirmed sequence is no error: an engine that schedules ahead of its sampler feeds tokens
    that it has not told yet, and blocks that hold one have no hash to be saved under (K6).

    Raises EngineContractError naming the request, and the number that is wrong.
    """
    for name, number in (("computed_before", computed_before), ("tokens", tokens), ("draft_tokens", draft_tokens)):
        if whole_number(request_id, name, number) < 0:
            raise EngineContractError(f"request {request_id!r}: scheduled with {name} = {number}; it counts tokens from 0")
