"""What tests drive a connector with: two prompts, a part of a pass, what a plan would save, work of every kind at once."""

from akv.connector import Connector
from akv.request import Request
from akv.values.messages import PassPlan
from akv.values.requests import Scheduled
from akv_testing.clock import settle
from akv_testing.server import FakeServer, PageTable

#: With the four tokens per block of `tiny_layout()`: four whole blocks and two tokens.
TOKENS = tuple(range(18))
#: Nine whole blocks and two tokens, none of them in `TOKENS`: two batches and a bit with a `FakeServer`'s share of four slots.
LONG = tuple(range(100, 138))


def part(request: Request, before: int, tokens: int, table: PageTable, drafts: int = 0) -> Scheduled:
    """One request's part of a pass: it computes `tokens` behind the first `before`, and `drafts` on top."""
    return Scheduled(request=request, computed_before=before, tokens=tokens, draft_tokens=drafts, pages=table)


def blocks_to_save(plan: PassPlan) -> list[int]:
    """The blocks that a plan of one request would save.

    Raises AssertionError if the plan is of several requests, or if the blocks are not the same in every layer group: such a
    plan no connector makes.
    """
    listed = {group.blocks for order in plan.saves for group in order.groups}
    if len(plan.saves) > 1 or len(listed) > 1:
        raise AssertionError(f"one request saves the same blocks of each group: {plan.saves}")
    return [block for blocks in listed for block in blocks]


async def work_of_every_kind(server: FakeServer, kv: Connector) -> None:
    """Give a connector loads and saves, and return when each of its tasks has as much to do as it can hold.

    The store must hold `TOKENS`. Four requests "load0" to "load3" load them, and wait for each other. Two requests "save0" and
    "save1" save their number in front of `LONG`, one behind the other.
    """
    for number in range(4):
        request = kv.open_request(f"load{number}", TOKENS)
        request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
    for number in range(2):
        tokens = [number, *LONG]
        request = kv.open_request(f"save{number}", tokens)
        await server.compute(kv, request, tokens, server.allocate(tokens))
    await settle()
