"""The store calls themselves: keys, sizes, and places in registered memory. What lies there is the caller's to own."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from anyio import current_time, sleep
from anyio.lowlevel import checkpoint

from akv import observe
from akv.flow.answers import answer_each
from akv.flow.calls import CallDesk, always, nothing
from akv.flow.gate import PoolGate
from akv.ownership.slots import SlotTicket
from akv.plan.put_attempts import Probe, PutAttempts, Wait
from akv.ports.calls import CallKind, CallSize
from akv.ports.device import HostBuffer
from akv.ports.pool import UNSETTLED, KeyAnswer, KeyState, PagePool
from akv.values.messages import GroupPages

#: Puts those pages of a batch that are marked, and returns the pool's answer to each; None if it may not begin.
PutSome: TypeAlias = Callable[[Sequence[bool]], Awaitable[Sequence[KeyAnswer] | None]]
#: What the pool says of those pages of a batch that are marked.
ProbeSome: TypeAlias = Callable[[Sequence[bool]], Awaitable[Sequence[KeyState]]]


class StoreParts(Protocol):
    """What a store call needs."""

    @property
    def pool(self) -> PagePool:
        """The store."""
        ...

    @property
    def desk(self) -> CallDesk:
        """Starts the call and keeps its record."""
        ...

    @property
    def gate(self) -> PoolGate:
        """Asked before each call."""
        ...

    @property
    def lease_s(self) -> float:
        """The master's. What a get delivered after it may be another page's bytes (D4)."""
        ...


async def probe_keys(parts: StoreParts, keys: Sequence[str]) -> Sequence[KeyAnswer]:
    """Ask whether the pool has these keys, which renews their lease: an answer for each, in order.

    **Cancellation:** the call goes on and touches nothing.
    """
    if not parts.gate.lets_through():
        await checkpoint()
        return [KeyAnswer(KeyState.UNAVAILABLE)] * len(keys)
    answered = await parts.desk.run(CallKind.PROBE, partial(parts.pool.probe, keys), CallSize(len(keys)))
    return answer_each(answered, len(keys))


async def transfer(
    parts: StoreParts,
    kind: CallKind,
    keys: Sequence[str],
    sizes: Sequence[int],
    buffer: HostBuffer,
    offsets: Sequence[int],
    slots: SlotTicket | None = None,
    *,
    pages: GroupPages | None = None,
    begin: Callable[[], bool] = always,
    end: Callable[[], None] = nothing,
) -> Sequence[KeyAnswer] | None:
    """Move values between the pool and pieces of a registered buffer, and return the pool's answer for each key, in order.

    `kind`: GET or PUT. The pieces are those of slots, or of pages themselves: then `begin` and `end` are those of
    `CallDesk.run`, and the answer is None if `begin` refused. What a get delivered after the lease is LEASE_EXPIRED (D4).
    While the gate is shut no call begins, and every key's answer is UNAVAILABLE. Slots that a peer may still touch when the
    call has returned are out of use from then on (M3).

    **Cancellation:** the wait ends; the call goes on, and keeps what it touches until it returned (M1).
    """
    unasked = [KeyAnswer(KeyState.UNAVAILABLE)] * len(keys)
    if not parts.gate.lets_through():
        await checkpoint()
        return unasked

    def move() -> Sequence[KeyAnswer]:
        call = parts.pool.get if kind is CallKind.GET else parts.pool.put
        return answer_each(call(keys, buffer, offsets, sizes), len(keys))

    times: list[float] = []

    def begun() -> bool:
        times.append(current_time())
        return begin()

    def ended() -> None:
        times.append(current_time())
        end()

    answers: Sequence[KeyAnswer] | None
    settle, waiting = partial(_settle, parts, slots, offsets), parts.gate.ending_waits
    size = CallSize(len(keys), sum(sizes))
    answers = await parts.desk.run(
        kind, move, size, slots, pages=pages, begin=begun, end=ended, waiting=waiting, settle=settle
    )
    if not times:
        # The gate shut in the wait for a place, which calls that hang may hold for longer than anybody has.
        return unasked
    # Seen from the loop a call takes longer than in its thread, never less: the lease began behind the first of these times,
    # and the last byte came before the second. A slow loop may fail a get that was in time, but none that was late passes.
    if kind is CallKind.GET and answers is not None and times[1] - times[0] > parts.lease_s:
        return [KeyAnswer(KeyState.LEASE_EXPIRED, a.code) if a.state is KeyState.OK else a for a in answers]
    return answers


async def attempt_puts(
    attempts: PutAttempts, count: int, put: PutSome, probe: ProbeSome, *, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Make the attempts that a batch of `count` pages is worth (S5). None after the first begins once `stopped`.

    **Cancellation:** `attempts` tells what was answered until then; what is under way keeps its memory until it returned.
    """
    while (step := attempts.step) is not None and not (attempts.attempts and stopped()):
        if isinstance(step, Wait):
            await sleep(step.seconds)
            attempts.waited()
            continue
        some = [False] * count
        for index in step.pages:
            some[index] = True
        if isinstance(step, Probe):
            attempts.probed([state.value for state in await probe(some)], current_time())
            continue
        began = current_time()
        answers = await put(some)
        if answers is None:
            break
        attempts.answered([answer.state.value for answer in answers], began, current_time())


def _settle(parts: StoreParts, slots: SlotTicket | None, offsets: Sequence[int], answers: Sequence[KeyAnswer]) -> None:
    """Keep the slots of those keys out of use behind whose answer a transfer may be under way."""
    if slots is None or parts.pool.lets_go_at_return:
        return
    unsettled = [(offset, answer) for offset, answer in zip(offsets, answers, strict=True) if answer.state in UNSETTLED]
    if slots.withhold(offset for offset, _ in unsettled):
        _, first = unsettled[0]
        observe.emit(observe.SLOTS_WITHHELD, slots=len(unsettled), state=first.state.value, code=first.code)
