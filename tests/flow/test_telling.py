"""Which way pages came, told every `stats_interval_s` and posted for `akv stat` (V2, R1)."""

import logging
from typing import Any

import anyio
import pytest

from akv import Connector
from akv.ports.calls import CallKind
from akv_testing import settle
from akv_testing.board import FakeBoard
from akv_testing.segments import FakeHost
from akv_testing.server import FakeServer
from akv_testing.store import FakeStore
from akv_testing.traffic import LONG, TOKENS
from akv_testing.warm_segments import map_each, put_into_each

pytestmark = pytest.mark.anyio

#: Bytes of a block's pages in the two groups.
BLOCK = 16 + 24


class Scene:
    """A server that posts, and whose prompt lies in a segment in half: two of its four blocks."""

    def __init__(self, **settings: Any) -> None:
        self.board = FakeBoard()
        host = FakeHost()
        segment = host.lend(3 * BLOCK)
        store = FakeStore(anyio.current_time, lease_s=100.0)
        self.server = FakeServer(store=store, segments=host, board=self.board, stats_interval_s=30.0, **settings)
        put_into_each(self.server, [segment])
        self.server.put_in_store(TOKENS)
        self.segment = segment

    async def load(self, kv: Connector, name: str) -> None:
        _, load, _ = await self.server.load(kv, name, TOKENS)
        await load.wait()
        await settle()


def told(caplog: pytest.LogCaptureFixture, name: str = "akv.connector.stats") -> list[dict[str, Any]]:
    return [record.__dict__["akv_fields"] for record in caplog.records if getattr(record, "akv_event", "") == name]


async def test_V2_R1_pages_and_bytes_by_path_are_told_and_posted_every_interval_if_they_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "akv")
    scene = Scene()
    async with scene.server.open() as kv:
        await settle()
        # One that has read nothing is there, too.
        assert [post.reads.direct_pages for post in scene.board.posts] == [0]
        await map_each(scene.server, kv, [scene.segment])
        before = kv.pressure().reads
        await scene.load(kv, "r")
        reads = kv.pressure().reads
        assert (reads.direct_pages, reads.direct_bytes) == (before.direct_pages + 4, before.direct_bytes + 2 * BLOCK)
        assert (reads.staged["no_replica"], reads.staged_bytes["no_replica"]) == (4, 2 * BLOCK)
        await anyio.sleep(29.0)
        assert (len(scene.board.posts), told(caplog)) == (1, [])
        await anyio.sleep(1.0 + 3 * 30.0)
        await settle()
        assert [post.reads for post in scene.board.posts[1:]] == [reads]
        (event,) = told(caplog)
        assert event == {
            "direct_pages": reads.direct_pages,
            "direct_bytes": reads.direct_bytes,
            "staged": reads.staged,
            "staged_bytes": reads.staged_bytes,
            "segments": 1,
            "segment_bytes": scene.segment.entry.size,
        }
    assert (scene.board.posts[-1].model_key, scene.board.posts[-1].role) == ("m", "both")


async def test_V2_what_was_not_told_yet_is_told_when_the_connector_closes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "akv")
    scene = Scene()
    async with scene.server.open() as kv:
        await scene.load(kv, "r")
        reads = kv.pressure().reads
    (event,) = told(caplog)
    assert (event["direct_pages"], event["staged"]) == (reads.direct_pages, reads.staged)
    assert len(scene.board.posts) == 1, "a connector that closes begins no call"


async def test_V2_without_an_interval_nothing_is_posted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "akv")
    scene = Scene()
    async with scene.server.open(stats_interval_s=0) as kv:
        await scene.load(kv, "r")
        await anyio.sleep(100.0)
        assert (scene.board.posts, told(caplog)) == ([], [])
    assert len(told(caplog)) == 1


async def test_V2_a_place_that_cannot_be_written_costs_the_posts_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "akv")
    scene = Scene()
    scene.board.errors.append(OSError("full"))
    async with scene.server.open() as kv:
        await scene.load(kv, "r")
        await anyio.sleep(31.0)
        await settle()
        assert scene.board.posts == []
        assert len(told(caplog, "akv.connector.stats_unposted")) == 1
        assert len(told(caplog)) == 1
    assert scene.server.left_behind() == []


async def test_V2_a_post_that_hangs_holds_up_no_load() -> None:
    scene = Scene()
    gate = scene.server.runner.hold(CallKind.MAP)
    async with scene.server.open() as kv:
        await scene.load(kv, "r")
        assert kv.pressure().reads.staged["no_segment"] == 8
        gate.release()


async def test_O6_a_connector_that_takes_its_time_to_close_posts_no_more() -> None:
    scene = Scene()
    server = scene.server
    async with server.open(shutdown_deadline_s=100.0) as kv:
        gate = server.runner.hold(CallKind.PUT)
        request = kv.open_request("save", LONG)
        await server.compute(kv, request, LONG, server.allocate(LONG))
        await scene.load(kv, "r")
        posts = len(scene.board.posts)
    assert len(scene.board.posts) == posts
    gate.release()
