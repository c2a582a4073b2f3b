"""What the two halves say to each other survives the way, and a newer half is understood or seen (D1)."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv.values.layout import LayerGroup, Layout, Region
from akv.values.messages import (
    MESSAGE_VERSION,
    BadPage,
    GroupPages,
    LoadOrder,
    LoadResult,
    LoadState,
    NoMoreWork,
    PagesUnread,
    PassPlan,
    PassReport,
    PlanDropped,
    PlanEnded,
    RankHello,
    RankOrders,
    RankReport,
    Renamed,
    SaveOrder,
    SaveResult,
    SavesNow,
    Terms,
    Withdrawal,
)

COLUMN = GroupPages(1, (3, 4), (7, 9), (b"a" * 16, b"\xff" * 16))
WORK: dict[str, Any] = {"request_id": "r1", "incarnation": 2}
SAVE = SaveOrder(save_id=5, groups=(COLUMN,), **WORK)
LOADED = LoadResult(load_id=4, state=LoadState.LOADED, pages=2, bytes=8192, **WORK)
FAILED = LoadResult(
    load_id=4,
    state=LoadState.FAILED,
    failed_key="akv1/m/w1r0/lg0/t32b64/00",
    reason="missing",
    bad_pages=(BadPage(0, b"\0" * 16, named=True),),
    **WORK,
)
SAVED = SaveResult(save_id=5, stored=(3,), refused=(4,), dropped=(5,), bytes=4096, reason="no_space", **WORK)
LAYOUT = Layout(
    tokens_per_block=32,
    world=2,
    groups=(
        LayerGroup(
            layers=(0,), dtype="float32", kv_heads=2, head_size=8, regions=(Region(name="layers.0", bytes_per_page=2048),)
        ),
    ),
)
TERMS = Terms(
    version=MESSAGE_VERSION,
    load_mode="async",
    role="both",
    layout="00" * 16,
    key_space="akv1/m",
    world=1,
    lookahead=0,
    page_counts=(10, 20),
)
MESSAGES: list[msgspec.Struct] = [
    LoadOrder(load_id=4, groups=(COLUMN,), **WORK),
    SAVE,
    Withdrawal(**WORK),
    PassPlan(plan_id=6, saves=(SAVE,)),
    LOADED,
    FAILED,
    SAVED,
    PagesUnread(**WORK),
    PassReport(loads=(LOADED, FAILED), saves=(SAVED,), unread=(PagesUnread(**WORK),)),
    TERMS,
    RankOrders(
        orders=(
            LoadOrder(load_id=4, groups=(COLUMN,), **WORK),
            PassPlan(plan_id=6, saves=(SAVE,)),
            PlanEnded(plan_id=6, saves=(SAVE.save_id,)),
            PlanDropped(plan_id=7),
            SavesNow(saves=(SAVE,)),
            Withdrawal(preempted=True, **WORK),
            Renamed(revision="step-2"),
            NoMoreWork(reason="degraded"),
        )
    ),
    RankReport(rank=1, report=PassReport(loads=(FAILED,)), pool_returned=True, degraded="DeviceError", ended=True),
    RankHello(rank=1, terms=TERMS, layout=LAYOUT),
]
EACH = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


@EACH
def test_D1_a_message_survives_the_way_between_processes(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


@EACH
def test_D1_fields_of_a_newer_half_are_tolerated(message: msgspec.Struct) -> None:
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    newer["added_later"] = {"of": [1, None]}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(newer), type=type(message)) == message


@pytest.mark.parametrize("message", [PassPlan(plan_id=1), PassReport(), TERMS], ids=lambda message: type(message).__name__)
def test_D1_the_version_travels_and_another_one_shows(message: PassPlan | PassReport | Terms) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert sent["version"] == message.version == MESSAGE_VERSION
    sent["version"] = MESSAGE_VERSION + 1
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(message))
    assert received.version == MESSAGE_VERSION + 1
    assert received != message


@EACH
def test_D1_a_message_is_frozen(message: msgspec.Struct) -> None:
    field = message.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(message, field, getattr(message, field))


@pytest.mark.parametrize(("field", "wrong"), [("state", "half"), ("load_id", "4"), ("pages", 1.5)])
def test_D2_a_result_that_says_something_else_is_refused_when_decoded(field: str, wrong: object) -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(LOADED)) | {field: wrong}
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=LoadResult)


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.binary(min_size=16, max_size=16)), min_size=1),
    st.text(),
    st.integers(0, 2**40),
)
def test_D1_columns_of_any_content_survive(rows: list[tuple[int, int, bytes]], request_id: str, number: int) -> None:
    blocks, pages, hashes = zip(*rows, strict=True)
    order = SaveOrder(
        save_id=number, request_id=request_id, incarnation=number, groups=(GroupPages(0, blocks, pages, hashes),)
    )
    plan = PassPlan(plan_id=number, saves=(order,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=PassPlan) == plan
