"""The three fakes together, small enough for a test to print, in one line."""

from collections.abc import Callable, Sequence

import anyio

from akv.ports import Ports
from akv.ports.calls import CallKind, CallSize
from akv.values.layout import LayerGroup, Layout, Region
from akv_testing.board import FakeBoard
from akv_testing.calls import FakeRunner
from akv_testing.device import FakeDevice
from akv_testing.pool import FakePool
from akv_testing.segments import FakeHost
from akv_testing.store import FakeStore


class FakePorts(Ports, frozen=True, kw_only=True):
    """What a connector needs of the world, faked: `open_connector(..., ports=fake_ports())`."""

    pool: FakePool
    device: FakeDevice
    runner: FakeRunner
    segments: FakeHost | None = None
    board: FakeBoard | None = None


def tiny_layout(
    *, groups: int = 1, tokens_per_block: int = 4, regions: int = 2, bytes_per_region: int = 8, world: int = 1
) -> Layout:
    """A valid layout with small pages: `regions` buffers of `bytes_per_region` bytes per page, one layer per group.

    Each group's pages are one region larger than those of the group before it, so that pages of two groups are never the same
    size by accident.
    """
    return Layout(
        tokens_per_block=tokens_per_block,
        groups=tuple(
            LayerGroup(
                layers=(group,),
                dtype="float32",
                kv_heads=1,
                head_size=2,
                regions=tuple(
                    Region(name=f"layers.{group}.{index}", bytes_per_page=bytes_per_region) for index in range(regions + group)
                ),
            )
            for group in range(groups)
        ),
        world=world,
    )


def fake_ports(
    layout: Layout | None = None,
    *,
    pages: int | Sequence[int] = 64,
    store: FakeStore | None = None,
    latency: Callable[[CallKind, CallSize], float] | None = None,
    name: str = "pool",
    host_pages: bool = False,
    segments: FakeHost | None = None,
    board: FakeBoard | None = None,
    now: Callable[[], float] = anyio.current_time,
) -> FakePorts:
    """A fake pool, device and runner under one clock.

    `layout`: `tiny_layout()` by default. `pages`: pages per group, one number for all or one each. `store`: what several
    processes share; a new one of unlimited size by default. `latency`: of the runner's calls; 0 by default. `host_pages`: the
    store can reach the device's pages, as on a CPU. `segments`: what processes of this host lend; nothing by default. `board`:
    takes what connectors post.
    """
    geometry = tiny_layout() if layout is None else layout
    counts = [pages] * len(geometry.groups) if isinstance(pages, int) else pages
    return FakePorts(
        pool=FakePool(FakeStore(now) if store is None else store, name=name),
        device=FakeDevice(geometry, counts, now, host_pages=host_pages),
        runner=FakeRunner(latency=latency, now=now),
        segments=segments,
        board=board,
    )
