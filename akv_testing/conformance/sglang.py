"""What SGLang needs of a storage backend, whatever store is behind it: run on the stand-in of `akv_testing.engines.sglang`.

    class TestMyBackend(HiCacheConformance):
        @pytest.fixture
        def make_backend(self) -> MakeBackend: ...

The backend must be a subclass of `akv_testing.engines.sglang.HiCacheStorage` here, as it is one of SGLang's own there.
Blocking code with threads: it needs no event loop.
"""

# ruff: noqa: D102 - a test's name says what holds

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from akv_testing.engines.sglang import (
    HiCache,
    HiCacheStorageConfig,
    HostPool,
    LatentHostPool,
    PoolHitPolicy,
    PoolName,
    StatePool,
)
from akv_testing.engines.sglang.rank import MakeBackend, Rank, SidePool

#: A server of so many ranks, with its host pools, that uses the store of all other servers of a test.
Server = Callable[..., HiCache]
#: Tokens of a page.
PAGE = 4


def prompt(pages: int, *, first: int = 1) -> list[int]:
    """Tokens of so many whole pages; prompts that begin with another token share none."""
    return [first, *range(1000, 1000 + pages * PAGE - 1)]


class HiCacheConformance:
    """Fixtures to supply:

    - `make_backend`: makes a backend of a `HiCacheStorageConfig`; all that it makes in one test are clients of one store,
    which holds nothing at the beginning and has room for a few MiB. May add to `extra_config`, and must leave `interface_v1`
    there.
    """

    @pytest.fixture(params=[True, False], ids=["v1", "flat"])
    def interface_v1(self, request: pytest.FixtureRequest) -> bool:
        """Whether the engine hands over where pages lie, or flat copies of them."""
        v1: bool = request.param
        return v1

    @pytest.fixture
    def server(self, make_backend: MakeBackend, interface_v1: bool) -> Iterator[Server]:
        """Starts servers; at the end of the test nothing may have been written where nothing was to be."""
        started: list[HiCache] = []

        def start(
            *,
            ranks: int = 1,
            latent: bool = False,
            layout: str = "page_first",
            sides: Sequence[PoolName] = (),
            pages: int = 400,
        ) -> HiCache:
            config = HiCacheStorageConfig(
                tp_size=ranks, is_mla_model=latent, model_name="a/model", extra_config={"interface_v1": int(interface_v1)}
            )
            kind = LatentHostPool if latent else HostPool
            made = [
                Rank(
                    replace(config, tp_rank=rank, extra_config=dict(config.extra_config or {})),
                    make_backend,
                    kind(layout=layout, pages=pages, page_size=PAGE),
                    {name: side_pool(name) for name in sides},
                )
                for rank in range(ranks)
            ]
            started.append(HiCache(made))
            return started[-1]

        yield start
        for cache in started:
            cache.check()
            cache.detach()
            cache.check()

    def test_what_one_server_wrote_another_one_reads(self, server: Server) -> None:
        one, other = server(), server()
        written_by(one, prompt(6))
        assert other.prefetch(prompt(6)).wait() == 6
        other.check()

    def test_a_prompt_that_nobody_wrote_is_a_miss(self, server: Server) -> None:
        cache = server()
        assert cache.prefetch(prompt(6)).wait() == 0
        written_by(cache, prompt(6))
        assert cache.prefetch(prompt(6, first=2)).wait() == 0
        cache.check()

    def test_a_longer_prompt_gets_the_part_that_was_written(self, server: Server) -> None:
        cache = server()
        written_by(cache, prompt(5))
        assert cache.prefetch(prompt(9)).wait() == 5
        cache.check()

    def test_behind_what_the_host_holds_the_rest_is_fetched(self, server: Server) -> None:
        one, other = server(), server()
        written_by(one, prompt(9))
        other.compute(prompt(3))
        assert other.prefetch(prompt(9)).wait() == 6
        other.check()

    def test_long_prompts_go_in_several_batches(self, server: Server) -> None:
        one, other = server(), server()
        written_by(one, prompt(300))
        assert other.prefetch(prompt(300)).wait() == 300
        other.check()

    def test_what_was_written_can_be_written_again(self, server: Server) -> None:
        one, other = server(), server()
        written_by(one, prompt(4))
        other.compute(prompt(8))
        assert other.backup(prompt(8)).wait() == 8
        one.evict(prompt(4))
        assert one.prefetch(prompt(8)).wait() == 8
        one.check()

    def test_what_a_request_names_apart_is_kept_apart(self, server: Server) -> None:
        cache = server()
        written_by(cache, prompt(4), "adapter-1")
        assert cache.prefetch(prompt(4), "adapter-2").wait() == 0
        assert cache.prefetch(prompt(4)).wait() == 0
        assert cache.prefetch(prompt(4), "adapter-1").wait() == 4
        cache.check()

    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
    def test_each_layout_comes_back_as_it_was(self, server: Server, layout: str) -> None:
        one, other = server(layout=layout), server(layout=layout)
        written_by(one, prompt(5))
        assert other.prefetch(prompt(5)).wait() == 5
        other.check()

    def test_servers_with_different_layouts_read_nothing_of_each_other(self, server: Server) -> None:
        one, other = server(layout="page_first"), server(layout="page_first_direct")
        written_by(one, prompt(5))
        assert other.prefetch(prompt(5)).wait() == 0
        other.check()

    def test_every_rank_gets_its_own_bytes(self, server: Server) -> None:
        one, other = server(ranks=2), server(ranks=2)
        written_by(one, prompt(5))
        assert other.prefetch(prompt(5)).wait() == 5
        other.check()

    def test_servers_of_different_sizes_read_nothing_of_each_other(self, server: Server) -> None:
        one, other = server(ranks=2), server(ranks=1)
        written_by(one, prompt(5))
        assert other.prefetch(prompt(5)).wait() == 0

    def test_latents_are_written_by_one_rank_and_read_by_all(self, server: Server) -> None:
        one, other = server(ranks=2, latent=True), server(ranks=2, latent=True)
        written_by(one, prompt(5))
        assert other.prefetch(prompt(5)).wait() == 5
        other.check()

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
    def test_side_pools_come_with_the_prefix_that_needs_them(self, server: Server, ranks: int, latent: bool) -> None:
        sides = (PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA) if not latent else (PoolName.MAMBA,)
        one, other = (server(ranks=ranks, latent=latent, sides=sides) for _ in range(2))
        written_by(one, prompt(6))
        assert other.prefetch(prompt(8)).wait() == 6
        other.check()
        other.evict(prompt(8))
        assert other.prefetch(prompt(6)).wait() == 6
        other.check()

    def test_without_its_state_a_prefix_is_not_restored(self, server: Server) -> None:
        one, other = server(sides=(PoolName.MAMBA,)), server(sides=(PoolName.MAMBA,))
        written_by(one, prompt(6))
        # States stand at the ends of what was written: five pages have their KV, and no state.
        assert other.prefetch(prompt(5)).wait() == 0
        assert other.prefetch(prompt(8)).wait() == 6
        other.check()

    def test_cleared_storage_is_empty_and_can_be_filled_again(self, server: Server) -> None:
        cache = server(ranks=2)
        written_by(cache, prompt(4))
        cache.clear_storage()
        assert cache.prefetch(prompt(4)).wait() == 0
        written_by(cache, prompt(4))
        assert cache.prefetch(prompt(4)).wait() == 4
        cache.check()

    def test_a_prefetch_that_is_no_longer_wanted_ends_between_batches(self, server: Server) -> None:
        one, other = server(), server()
        written_by(one, prompt(300))
        operation = other.prefetch(prompt(300))
        operation.terminate()
        assert operation.wait() % 128 in {0, 300 % 128}
        other.check()


def written_by(cache: HiCache, tokens: Sequence[int], extra_key: str | None = None) -> None:
    """A server computes a prompt, writes it, and forgets it."""
    cache.compute(tokens, extra_key)
    assert cache.backup(tokens, extra_key).wait() == len(tokens) // PAGE
    cache.evict(tokens, extra_key)


def side_pool(name: PoolName) -> SidePool:
    """A small pool of that kind."""
    if name is PoolName.MAMBA:
        return SidePool(StatePool(), PoolHitPolicy.TRAILING_PAGES)
    pool = HostPool(pages=32, page_size=PAGE, layers=1, heads=1)
    return SidePool(pool, PoolHitPolicy.TRAILING_PAGES, 2) if name is PoolName.SWA else SidePool(pool, PoolHitPolicy.ALL_PAGES)
