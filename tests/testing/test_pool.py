"""FakePool and FakeStore: room, leases, eviction, unfinished writers, scripts, and loud misuse."""

import pytest

from akv.errors import NotOpenError, PoolError
from akv.ports.pool import UNSETTLED, KeyAnswer, KeyState, PagePool
from akv_testing.clock import ManualClock
from akv_testing.errors import MisuseError, UnregisteredBuffer
from akv_testing.memory import HOST_POISON, FakeHostBuffer
from akv_testing.pool import CODES, FakePool, Operation
from akv_testing.store import EVICTION_DELAY_S, FakeStore

SIZE = 16


class Process:
    """A pool client with one registered buffer, as a process has it."""

    def __init__(self, store: FakeStore) -> None:
        self.pool = FakePool(store)
        self.port: PagePool = self.pool
        self.buffer = FakeHostBuffer(8 * SIZE)
        self.pool.register(self.buffer)

    def put(self, key: str, byte: int, size: int = SIZE) -> KeyAnswer:
        self.buffer.host_write(0, bytes([byte]) * size)
        return self.pool.put([key], self.buffer, [0], [size])[0]

    def get(self, key: str, size: int = SIZE) -> tuple[KeyState, bytes]:
        answer = self.pool.get([key], self.buffer, [SIZE], [size])[0]
        return answer.state, self.buffer.host_read(SIZE, size)

    def probe(self, key: str) -> KeyState:
        return self.pool.probe([key])[0].state


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def test_two_processes_share_a_store_and_the_first_value_stays(clock: ManualClock) -> None:
    store = FakeStore(clock)
    a, b = Process(store), Process(store)
    assert a.put("k", 1) == KeyAnswer(KeyState.OK, 0)
    assert b.put("k", 2).state is KeyState.OK
    assert b.get("k") == (KeyState.OK, b"\x01" * SIZE)
    assert store.used_bytes == SIZE
    assert b.pool.bytes_moved == {"put": SIZE, "get": SIZE}
    assert [call.operation for call in b.pool.calls] == ["put", "get"]


@pytest.mark.parametrize(("stored", "code"), [(SIZE - 4, SIZE - 4), (SIZE + 4, -600)])
def test_X4_a_value_of_another_size_is_no_hit_and_leaves_poison(clock: ManualClock, stored: int, code: int) -> None:
    process = Process(FakeStore(clock))
    process.put("k", 1, stored)
    assert process.pool.get(["k"], process.buffer, [SIZE], [SIZE]) == [KeyAnswer(KeyState.WRONG_SIZE, code)]
    assert process.buffer.host_read(SIZE, SIZE)[-4:] == bytes([HOST_POISON]) * 4


def test_a_missing_key_overwrites_the_piece_with_poison(clock: ManualClock) -> None:
    process = Process(FakeStore(clock))
    process.buffer.host_write(SIZE, bytes(SIZE))
    assert process.get("k") == (KeyState.MISSING, bytes([HOST_POISON]) * SIZE)


def test_an_unfinished_writer_answers_ok_to_puts_and_missing_to_readers(clock: ManualClock) -> None:
    store = FakeStore(clock)
    process = Process(store)
    store.begin_write("k")
    assert process.put("k", 1).state is KeyState.OK
    assert process.probe("k") is KeyState.MISSING
    assert process.get("k")[0] is KeyState.MISSING
    store.finish_write("k", b"\x07" * SIZE)
    assert process.get("k") == (KeyState.OK, b"\x07" * SIZE)
    store.abandon_write("k")
    assert process.probe("k") is KeyState.OK
    store.begin_write("other")
    store.abandon_write("other")
    process.put("other", 3)
    assert process.probe("other") is KeyState.OK


def test_probe_and_get_grant_leases_that_eviction_respects_and_put_grants_none(clock: ManualClock) -> None:
    store = FakeStore(clock, lease_s=5)
    process = Process(store)
    for key in ("put", "probed", "got"):
        process.put(key, 1)
    process.probe("probed")
    process.get("got")
    assert [store.evict(key) for key in ("put", "probed", "got", "absent")] == [True, False, False, False]
    clock.advance(5)
    assert [store.evict(key) for key in ("probed", "got")] == [True, True]


def test_a_get_that_takes_longer_than_the_lease_is_no_hit(clock: ManualClock) -> None:
    store = FakeStore(clock, lease_s=5)
    process = Process(store)
    process.put("k", 1)
    store.get_takes_s = 5.1
    assert process.get("k") == (KeyState.LEASE_EXPIRED, bytes([HOST_POISON]) * SIZE)


def test_a_full_store_refuses_and_has_room_a_moment_later(clock: ManualClock) -> None:
    store = FakeStore(clock, capacity_bytes=4 * SIZE, eviction_ratio=0.25, lease_s=1)
    process = Process(store)
    for key in "abcd":
        process.put(key, 1)
    process.probe("a")
    clock.advance(1)
    for _ in range(2):
        assert process.put("e", 1) == KeyAnswer(KeyState.NO_SPACE, -200)
    clock.advance(EVICTION_DELAY_S)
    assert process.put("e", 1).state is KeyState.OK
    assert store.keys() == ["c", "d", "a", "e"], "the least recently used key goes"


def test_above_the_watermark_eviction_runs_unasked(clock: ManualClock) -> None:
    store = FakeStore(clock, capacity_bytes=4 * SIZE, high_watermark=0.5, eviction_ratio=0.25)
    process = Process(store)
    for key in "abc":
        process.put(key, 1)
    assert store.keys() == ["a", "b", "c"]
    clock.advance(EVICTION_DELAY_S)
    assert process.probe("c") is KeyState.OK
    assert store.keys() == ["c"]


def test_scripts_answer_for_chosen_keys_calls_and_times(clock: ManualClock) -> None:
    store = FakeStore(clock)
    process = Process(store)
    for key in "ab":
        process.put(key, 1)
    process.pool.answer("get", KeyState.MISSING, key="b", skip=1)
    assert [process.get("b")[0] for _ in range(3)] == [KeyState.OK, KeyState.MISSING, KeyState.OK]
    process.pool.answer("probe", KeyAnswer(KeyState.REFUSED, -1), times=None, key=lambda key: key > "a")
    assert process.pool.probe(["a", "b"]) == [KeyAnswer(KeyState.OK, 1), KeyAnswer(KeyState.REFUSED, -1)]
    process.pool.answer("put", KeyState.OK)
    assert process.put("c", 1).state is KeyState.OK
    assert store.value("c") is None, "a scripted OK stores nothing"


@pytest.mark.parametrize("state", [state for state in KeyState if state is not KeyState.OK])
def test_L2_any_bad_answer_can_be_scripted_for_any_call_and_a_get_leaves_poison(clock: ManualClock, state: KeyState) -> None:
    process = Process(FakeStore(clock))
    process.put("there", 1)
    for operation in ("probe", "get", "put"):
        process.pool.answer(operation, state)
    bad = KeyAnswer(state, CODES[state])
    assert bad.code < 0
    assert process.pool.probe(["there"]) == [bad]
    assert process.pool.get(["there"], process.buffer, [SIZE], [SIZE]) == [bad]
    assert process.buffer.host_read(SIZE, SIZE) == bytes([HOST_POISON]) * SIZE
    assert process.put("new", 2) == bad
    assert process.probe("new") is KeyState.MISSING
    assert process.get("there") == (KeyState.OK, b"\x01" * SIZE), "and once only"


def test_L2_a_list_of_the_wrong_length_reaches_nobody_but_as_a_refusal_of_every_key(clock: ManualClock) -> None:
    # What the adapter makes of one; see tests/pool/test_codes.py.
    process = Process(FakeStore(clock))
    process.put("a", 1)
    process.pool.answer("probe", KeyAnswer(KeyState.REFUSED), times=2)
    assert process.pool.probe(["a", "b"]) == [KeyAnswer(KeyState.REFUSED)] * 2


def test_a_store_that_is_down_serves_nobody(clock: ManualClock) -> None:
    store = FakeStore(clock)
    process = Process(store)
    store.down = True
    assert {process.put("k", 1).state, process.probe("k"), process.get("k")[0]} == {KeyState.UNAVAILABLE}
    store.down = False
    process.put("k", 1)
    store.clear()
    assert process.probe("k") is KeyState.MISSING


def test_damage_is_for_tests_to_make(clock: ManualClock) -> None:
    store = FakeStore(clock)
    process = Process(store)
    process.put("a", 1)
    process.put("b", 2)
    store.swap("a", "b")
    assert process.get("a") == (KeyState.OK, b"\x02" * SIZE)
    store.write("a", b"")
    assert store.used_bytes == SIZE


@pytest.mark.parametrize(
    ("offsets", "sizes"), [([0, 8], [16, 16]), ([-1, 32], [16, 16]), ([0, 120], [16, 16]), ([0], [16, 16])]
)
def test_pieces_that_overlap_or_leave_the_buffer_fail_loudly(clock: ManualClock, offsets: list[int], sizes: list[int]) -> None:
    process = Process(FakeStore(clock))
    with pytest.raises(MisuseError):
        process.pool.get(["a", "b"], process.buffer, offsets, sizes)


def test_an_unregistered_buffer_fails_loudly(clock: ManualClock) -> None:
    process = Process(FakeStore(clock))
    process.pool.unregister(process.buffer)
    process.pool.unregister(process.buffer)
    with pytest.raises(UnregisteredBuffer):
        process.pool.put(["k"], process.buffer, [0], [SIZE])
    assert process.pool.registered == []


def test_registering_twice_is_refused(clock: ManualClock) -> None:
    process = Process(FakeStore(clock))
    with pytest.raises(PoolError, match="overlaps"):
        process.pool.register(process.buffer)


def test_use_after_close_is_an_error(clock: ManualClock) -> None:
    process = Process(FakeStore(clock))
    process.pool.close()
    process.pool.close()
    for use in (lambda: process.probe("k"), lambda: process.get("k"), lambda: process.pool.register(process.buffer)):
        with pytest.raises(NotOpenError):
            use()


@pytest.mark.parametrize("operation", ["get", "put"])
@pytest.mark.parametrize("state", sorted(UNSETTLED))
def test_M3_over_rdma_memory_behind_a_failed_transfer_is_touched_until_it_is_unregistered(
    clock: ManualClock, operation: Operation, state: KeyState
) -> None:
    process = Process(FakeStore(clock))
    process.pool.lets_go_at_return = False
    process.pool.answer(operation, state, key="bad")
    getattr(process.pool, operation)(["bad", "good"], process.buffer, [0, 2 * SIZE], [SIZE, SIZE])
    assert process.pool.unsettled_bytes == SIZE
    process.pool.put(["good"], process.buffer, [2 * SIZE], [SIZE])
    with pytest.raises(MisuseError, match="may go on"):
        process.pool.get(["good"], process.buffer, [SIZE - 1], [SIZE])
    with pytest.raises(MisuseError, match="may go on"):
        process.pool.put(["good"], process.buffer, [0], [SIZE])
    if operation == "put":
        process.pool.put(["bad"], process.buffer, [0], [SIZE])
    process.pool.refuses_unregister = True
    with pytest.raises(PoolError, match="unregister"):
        process.pool.unregister(process.buffer)
    assert (process.pool.registered, process.pool.unsettled_bytes) == ([process.buffer], SIZE)
    process.pool.refuses_unregister = False
    process.pool.unregister(process.buffer)
    assert process.pool.unsettled_bytes == 0
    process.pool.register(process.buffer)
    process.pool.put(["other"], process.buffer, [0], [SIZE])


@pytest.mark.parametrize("state", sorted(set(KeyState) - UNSETTLED))
def test_M3_every_other_answer_and_every_answer_over_tcp_lets_go(clock: ManualClock, state: KeyState) -> None:
    for rdma, answer in ((True, state), (False, KeyState.HOLDER_LOST)):
        process = Process(FakeStore(clock))
        process.pool.lets_go_at_return = not rdma
        process.pool.answer("get", answer)
        process.get("k")
        assert process.pool.unsettled_bytes == 0
