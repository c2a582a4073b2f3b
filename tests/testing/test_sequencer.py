"""Sequencer: the order that the test says, on both backends."""

import anyio
import pytest

from akv_testing.sequencer import SequenceBroken, Sequencer

pytestmark = pytest.mark.anyio


async def test_turns_happen_in_their_order() -> None:
    turns, order = Sequencer(), list[int]()

    async def take(*mine: int) -> None:
        for turn in mine:
            async with turns(turn):
                order.append(turn)

    async with anyio.create_task_group() as group:
        group.start_soon(take, 1, 2, 5)
        group.start_soon(take, 0, 4)
        group.start_soon(take, 3)
    assert order == [0, 1, 2, 3, 4, 5]
    assert anyio.current_time() == 0


async def test_what_follows_from_a_turn_happens_before_the_next() -> None:
    turns, event, seen = Sequencer(), anyio.Event(), list[str]()

    async def waiter() -> None:
        await event.wait()
        await anyio.lowlevel.checkpoint()
        seen.append("followed")

    async def first() -> None:
        async with turns(0):
            event.set()

    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        group.start_soon(first)
        async with turns(1):
            assert seen == ["followed"]


async def test_a_turn_taken_twice_is_refused() -> None:
    turns = Sequencer()
    async with turns(0):
        pass
    with pytest.raises(SequenceBroken, match="turn 0"):
        async with turns(0):
            pass


async def test_a_cancelled_waiter_breaks_the_sequence_for_all() -> None:
    turns, broken = Sequencer(), list[str]()

    async def last() -> None:
        try:
            async with turns(2):
                pass
        except SequenceBroken as error:
            broken.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(last)
        with anyio.move_on_after(1):
            async with turns(1):
                pass
    assert broken == ["the task of turn 1 was cancelled while it waited"]
