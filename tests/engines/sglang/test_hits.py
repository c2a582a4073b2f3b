"""How much of a prompt may be prefetched, side pools and their policies included (L2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.engines.sglang.hits import PoolPages, hits_of, prefix_length


def pool(there: str, policy: str = "all_pages", trailing: int = 1) -> PoolPages:
    return PoolPages(name="side", policy=policy, trailing=trailing, there=[mark == "x" for mark in there])


@pytest.mark.parametrize(("there", "length"), [([], 0), ([True, True], 2), ([True, False, True], 1), ([False], 0)])
def test_a_prefix_ends_before_the_first_hole(there: list[bool], length: int) -> None:
    assert prefix_length(there) == length


@pytest.mark.parametrize(
    ("side", "pages", "by_pool", "restorable"),
    [
        (pool("xxxx"), 4, {"kv": 4, "side": 4}, [1, 2, 3, 4]),
        (pool("xx-x"), 2, {"kv": 4, "side": 2}, [1, 2]),
        (pool("-xxx"), 0, {"kv": 4}, []),
        (pool("-x-x", "trailing_pages"), 4, {"kv": 4, "side": 4}, [2, 4]),
        (pool("-x--", "trailing_pages"), 2, {"kv": 4, "side": 2}, [2]),
        (pool("xx-x", "trailing_pages", 2), 2, {"kv": 4, "side": 2}, [1, 2]),
        (pool("-xx-", "trailing_pages", 2), 3, {"kv": 4, "side": 3}, [3]),
        (pool("x---", "trailing_pages", 9), 1, {"kv": 4, "side": 1}, [1]),
        (pool("----", "block_groups"), 4, {"kv": 4}, [1, 2, 3, 4]),
    ],
)
def test_L2_a_prefix_counts_with_all_that_its_side_pools_need(
    side: PoolPages, pages: int, by_pool: dict[str, int], restorable: list[int]
) -> None:
    hits = hits_of("kv", 4, [side])
    assert (hits.pages, hits.by_pool, hits.restorable) == (pages, by_pool, restorable)


def test_pools_bound_each_other() -> None:
    hits = hits_of("kv", 4, [pool("xxx-"), pool("-x-x", "trailing_pages")])
    assert (hits.pages, hits.restorable) == (2, [2])
    assert hits_of("kv", 0, [pool("")]).by_pool == {}


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4))
def test_a_window_ends_where_its_last_pages_are_there(there: list[bool], trailing: int) -> None:
    side = PoolPages(name="side", policy="trailing_pages", trailing=trailing, there=there)
    wanted = [end for end in range(1, len(there) + 1) if all(there[max(0, end - trailing) : end])]
    assert hits_of("kv", len(there), [side]).restorable == wanted
