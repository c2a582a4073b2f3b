"""Use before the block, after it, and in a forked child."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from akv import (
    LoadState,
    NotOpenError,
)
from akv.ports.calls import CallKind
from akv_testing import run_virtual
from akv_testing.server import FakeServer
from akv_testing.traffic import TOKENS

pytestmark = pytest.mark.anyio


async def test_use_before_the_block_says_how_to_open() -> None:
    opening: Any = FakeServer().open()
    for use in (
        "open_request",
        "completed",
        "changed",
        "plan_pass",
        "after_forward",
    ):
        with pytest.raises(NotOpenError, match="async with"):
            getattr(opening, use)
    async with opening as kv:
        kv.completed()


async def test_use_after_the_block_is_refused_everywhere() -> None:
    server = FakeServer.warm(TOKENS)
    async with server.open() as kv:
        request = kv.open_request("r", TOKENS)
        load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
        plan = kv.plan_pass([])
    calls: list[Callable[[], object]] = [
        lambda: kv.open_request("x", TOKENS),
        kv.completed,
        lambda: kv.plan_pass([]),
        lambda: kv.drop_pass(plan),
        request.finish,
        lambda: request.append([1]),
    ]
    for call in calls:
        with pytest.raises(NotOpenError, match="closed"):
            call()
    for wait in (request.lookup, request.cancel, request.finished, kv.changed.wait, lambda: kv.after_forward(plan)):
        with pytest.raises(NotOpenError, match="closed"):
            await wait()
    # A load that the end of the connector cancelled says so; its pages are free.
    assert load.state is LoadState.CANCELLED


def test_use_in_a_forked_child_is_refused_and_never_hangs() -> None:
    """A real fork; the child drives the coroutines by hand, leaves at once, and says by its status what it saw."""

    def seen_by_child(calls: list[Callable[[], object]], waits: list[Callable[[], Any]]) -> int:
        for number, call in enumerate(calls):
            try:
                call()
            except NotOpenError:
                continue
            return 10 + number
        for number, wait in enumerate(waits):
            coroutine = wait()
            try:
                coroutine.send(None)
            except NotOpenError:
                continue
            return 20 + number
        return 0

    async def main() -> None:
        server = FakeServer.warm(TOKENS)
        gate = server.runner.hold(CallKind.GET)
        async with server.open() as kv:
            request = kv.open_request("r", TOKENS)
            load = request.reserve(await request.lookup(), 16, server.allocate(TOKENS))
            plan = kv.plan_pass([])
            children.append(os.fork())
            if children[0] == 0:
                status = 99
                try:
                    status = seen_by_child(
                        [lambda: kv.open_request("x", TOKENS), kv.completed, lambda: kv.plan_pass([]), request.finish],
                        [
                            request.lookup,
                            load.wait,
                            request.finished,
                            request.cancel,
                            kv.changed.wait,
                            lambda: kv.after_forward(plan),
                        ],
                    )
                finally:
                    os._exit(status)
            gate.release()
            await load.wait()

    children: list[int] = []
    run_virtual("asyncio", main)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
