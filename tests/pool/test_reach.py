"""Whether a master answers is found out with the loop's own sockets, within a deadline, and the cause is named."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from akv.errors import PoolError
from akv.pool.embedded import free_ports
from akv.pool.reach import reach_master
from akv_testing.processes import halt

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def listener(answer: bytes | None) -> AsyncIterator[str]:
    """A server that answers every connection alike; None: it says nothing."""

    async def serve(stream: SocketStream) -> None:
        # Whoever asks may be gone before the question was sent.
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            async with stream:
                await stream.receive()
                if answer is None:
                    await anyio.sleep_forever()
                elif answer:
                    await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as server, anyio.create_task_group() as group:
        group.start_soon(server.serve, serve)
        port: int = server.extra(SocketAttribute.local_port)
        yield f"127.0.0.1:{port}"
        group.cancel_scope.cancel()


@pytest.mark.mooncake
async def test_O7_a_live_master_answers(master: str) -> None:
    assert await reach_master(master, 5.0) is None  # type: ignore[func-returns-value]


@pytest.mark.mooncake
async def test_O7_a_frozen_master_still_accepts_and_is_refused_at_the_deadline(own_master: tuple[str, int]) -> None:
    address, pid = own_master
    halt(pid)
    began = time.monotonic()
    with pytest.raises(PoolError, match=rf"{address}.*did not answer within 0\.2 s"):
        await reach_master(address, 0.2)
    assert time.monotonic() - began < 1.0
    os.kill(pid, signal.SIGCONT)
    await reach_master(address, 5.0)


async def test_O7_nothing_listens() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(PoolError, match=f"{address}.*nothing accepts connections there.*not running"):
        await reach_master(address, 5.0)


async def test_O7_an_unknown_host() -> None:
    with pytest.raises(PoolError, match=r"nohost\.invalid:50051.*(cannot be resolved|nothing accepts)"):
        await reach_master("nohost.invalid:50051", 5.0)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"", "hung up"),
        (b"\x15", "hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not the RPC port"),
        (None, "did not answer within"),
    ],
)
async def test_O7_somebody_else_listens(answer: bytes | None, cause: str) -> None:
    async with listener(answer) as address:
        with pytest.raises(PoolError, match=f"{address}.*{cause}"):
            await reach_master(address, 0.2)


async def test_O7_asking_can_be_cancelled() -> None:
    async with listener(None) as address:
        with anyio.move_on_after(0.02) as scope:
            await reach_master(address, 60.0)
        assert scope.cancelled_caught
