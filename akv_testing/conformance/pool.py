"""What a `PagePool` promises, whatever store is behind it. Blocking code: it needs no event loop."""

# ruff: noqa: D102, N802 - a test's name says what holds, and by which rule

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from akv.errors import NotOpenError, PoolError
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState, PagePool

#: Bytes of a value in these tests. Neither a power of two nor a multiple of anything that a transport likes.
SIZE = 1037
#: Values that fit in the suite's buffer.
ROOM = 64


class PoolConformance:
    """Fixtures to supply:

    - `pool`: an open PagePool with room for a few MiB, in memory that it names the places of. It may be shared by all tests,
      and others may use its store.
    - `closed_pool`: a PagePool on which `close()` was called.
    - `new_key`: a function that gives a key which the store has never seen.
    - `memory`: a function that allocates a HostBuffer of so many bytes, at least; uninitialised.
    - `begin_write`: a function after which another client is writing a key, and does not finish during the test.
    """

    @pytest.fixture
    def buffer(self, pool: PagePool, memory: Callable[[int], HostBuffer]) -> Iterator[HostBuffer]:
        """Room for `ROOM` values, zeroed and registered for the test."""
        made = memory(ROOM * SIZE)
        made.view()[:] = bytes(made.nbytes)
        pool.register(made)
        yield made
        pool.unregister(made)

    def test_a_value_comes_back_as_it_was(self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]) -> None:
        key, data = new_key(), value(1)
        write(buffer, 3, data)
        assert states(pool.put([key], buffer, [3], [SIZE])) == [KeyState.OK]
        answers = pool.get([key], buffer, [2 * SIZE], [SIZE])
        assert answers == [KeyAnswer(KeyState.OK, SIZE)]
        assert read(buffer, 2 * SIZE) == data
        assert not any(buffer.view()[3 * SIZE :]), "a get writes its piece and nothing else"

    def test_L2_probe_says_for_each_key_in_order_whether_it_is_there(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        there, absent, also_there = new_key(), new_key(), new_key()
        pool.put([there, also_there], buffer, [0, 0], [SIZE, SIZE])
        answers = pool.probe([there, absent, also_there, there])
        assert states(answers) == [KeyState.OK, KeyState.MISSING, KeyState.OK, KeyState.OK]

    def test_pieces_lie_where_they_are_told_to_in_any_order(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        keys = [new_key() for _ in range(4)]
        for index in range(4):
            write(buffer, index * SIZE, value(index))
        pool.put(keys, buffer, [3 * SIZE, 0, 2 * SIZE, SIZE], [SIZE] * 4)
        offsets = [9 * SIZE, 30 * SIZE, 8 * SIZE, 63 * SIZE]
        assert set(states(pool.get(keys, buffer, offsets, [SIZE] * 4))) == {KeyState.OK}
        assert [read(buffer, offset) for offset in offsets] == [value(3), value(0), value(2), value(1)]

    def test_values_of_different_sizes_share_a_call(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        keys, sizes = [new_key(), new_key(), new_key()], [1, SIZE, 513]
        write(buffer, 0, value(5))
        assert set(states(pool.put(keys, buffer, [0, 0, 0], sizes))) == {KeyState.OK}
        offsets = [10 * SIZE, 11 * SIZE, 12 * SIZE]
        assert [answer.code for answer in pool.get(keys, buffer, offsets, sizes)] == sizes
        assert [read(buffer, at, size) for at, size in zip(offsets, sizes, strict=True)] == [value(5)[:n] for n in sizes]

    def test_the_first_value_stays(self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]) -> None:
        key = new_key()
        write(buffer, 0, value(1))
        write(buffer, SIZE, value(2))
        pool.put([key], buffer, [0], [SIZE])
        assert states(pool.put([key], buffer, [SIZE], [SIZE])) == [KeyState.OK]
        assert states(pool.put([key], buffer, [SIZE], [100])) == [KeyState.OK], "of another size too"
        pool.get([key], buffer, [2 * SIZE], [SIZE])
        assert read(buffer, 2 * SIZE) == value(1)

    def test_S5_a_key_that_stands_twice_in_a_put_keeps_its_first_piece(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        key, other = new_key(), new_key()
        for index in range(3):
            write(buffer, index * SIZE, value(index))
        answers = pool.put([key, other, key], buffer, [0, SIZE, 2 * SIZE], [SIZE] * 3)
        assert states(answers) == [KeyState.OK] * 3
        pool.get([key, other], buffer, [3 * SIZE, 4 * SIZE], [SIZE] * 2)
        assert (read(buffer, 3 * SIZE), read(buffer, 4 * SIZE)) == (value(0), value(1))

    def test_S5_of_many_writers_of_one_key_one_wins_whole(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        keys, writers = [new_key() for _ in range(4)], 8
        for writer in range(writers):
            write(buffer, writer * SIZE, value(writer))

        def work(writer: int) -> list[KeyState]:
            return states(pool.put(keys, buffer, [writer * SIZE] * 4, [SIZE] * 4))

        with ThreadPoolExecutor(writers) as threads:
            assert list(threads.map(work, range(writers))) == [[KeyState.OK] * 4] * writers, "no writer hears of another"
        back = [(writers + index) * SIZE for index in range(4)]
        assert states(pool.get(keys, buffer, back, [SIZE] * 4)) == [KeyState.OK] * 4
        assert {read(buffer, at) for at in back} <= {value(writer) for writer in range(writers)}

    def test_S5_a_key_that_another_client_is_writing_is_accepted_and_not_there(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str], begin_write: Callable[[str], None]
    ) -> None:
        unfinished, right = new_key(), new_key()
        begin_write(unfinished)
        pieces = ([0, SIZE], [SIZE, SIZE])
        assert states(pool.put([unfinished, right], buffer, *pieces)) == [KeyState.OK] * 2, "an OK proves no presence"
        assert states(pool.probe([unfinished, right])) == [KeyState.MISSING, KeyState.OK]
        assert states(pool.get([unfinished, right], buffer, *pieces)) == [KeyState.MISSING, KeyState.OK]

    def test_D3_a_missing_key_spoils_only_itself(self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]) -> None:
        key, absent = new_key(), new_key()
        write(buffer, 0, value(1))
        pool.put([key], buffer, [0], [SIZE])
        answers = pool.get([absent, key], buffer, [SIZE, 2 * SIZE], [SIZE] * 2)
        assert states(answers) == [KeyState.MISSING, KeyState.OK]
        assert read(buffer, 2 * SIZE) == value(1)

    @pytest.mark.parametrize("stored", [1, SIZE - 1, SIZE + 1, 2 * SIZE])
    def test_X4_a_value_of_another_size_is_wrong_and_stays_inside_its_piece(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str], stored: int
    ) -> None:
        key, right = new_key(), new_key()
        write(buffer, 0, value(1) + value(2))
        pool.put([key, right], buffer, [0, 0], [stored, SIZE])
        answers = pool.get([key, right], buffer, [10 * SIZE, 12 * SIZE], [SIZE] * 2)
        assert states(answers) == [KeyState.WRONG_SIZE, KeyState.OK]
        assert not any(read(buffer, 11 * SIZE)), "nothing past the room for it was written"
        assert read(buffer, 12 * SIZE) == value(1)

    def test_S11_what_is_removed_is_gone_leased_or_not(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        key, other, absent = new_key(), new_key(), new_key()
        write(buffer, 0, value(1))
        pool.put([key, other], buffer, [0, 0], [SIZE, SIZE])
        pool.probe([key])
        assert states(pool.remove([key, absent])) == [KeyState.OK, KeyState.MISSING]
        assert states(pool.probe([key, other])) == [KeyState.MISSING, KeyState.OK]
        # Another value can take its place.
        write(buffer, 0, value(2))
        assert states(pool.put([key], buffer, [0], [SIZE])) == [KeyState.OK]
        pool.get([key], buffer, [SIZE], [SIZE])
        assert read(buffer, SIZE) == value(2)

    def test_all_keys_with_a_prefix_are_removed_leased_or_not_and_no_other(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        # What has a meaning in a regular expression is an ordinary character of a prefix.
        prefix = f"{new_key()}/a.b~c/"
        inside, outside = [prefix + "1", prefix + "2"], [prefix.replace("a.b", "aXb") + "1", "other/" + prefix + "1"]
        write(buffer, 0, value(1))
        pool.put(inside + outside, buffer, [0] * 4, [SIZE] * 4)
        pool.probe(inside)
        assert pool.remove_all(prefix) == KeyAnswer(KeyState.OK, 2)
        assert states(pool.probe(inside + outside)) == [KeyState.MISSING, KeyState.MISSING, KeyState.OK, KeyState.OK]
        assert pool.remove_all(prefix) == KeyAnswer(KeyState.OK, 0)

    def test_a_call_for_nothing_answers_nothing(self, pool: PagePool, buffer: HostBuffer) -> None:
        assert pool.probe([]) == []
        assert pool.get([], buffer, [], []) == []
        assert pool.put([], buffer, [], []) == []

    def test_one_call_may_name_more_keys_than_a_transport_takes(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        count, size = 3000, 16
        keys = [new_key() for _ in range(count)]
        buffer.view()[: count * size] = (data := value(9, count * size))
        offsets, sizes = [index * size for index in range(count)], [size] * count
        assert set(states(pool.put(keys, buffer, offsets, sizes))) == {KeyState.OK}
        assert set(states(pool.probe(keys))) == {KeyState.OK}
        buffer.view()[:] = bytes(buffer.nbytes)
        assert set(states(pool.get(keys, buffer, offsets, sizes))) == {KeyState.OK}
        assert read(buffer, 0, count * size) == data

    def test_calls_from_several_threads_mix_no_bytes(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        keys = [[new_key() for _ in range(8)] for _ in range(4)]

        def work(thread: int) -> bool:
            mine, back = 16 * thread * SIZE, (16 * thread + 8) * SIZE
            for index, key in enumerate(keys[thread]):
                write(buffer, mine + index * SIZE, value(100 * thread + index))
                put = pool.put([key], buffer, [mine + index * SIZE], [SIZE])
                got = pool.get([key], buffer, [back + index * SIZE], [SIZE])
                if states(put + got) != [KeyState.OK] * 2:
                    return False
            return read(buffer, mine, 8 * SIZE) == read(buffer, back, 8 * SIZE)

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [True] * 4

    def test_a_buffer_that_is_not_registered_is_refused(
        self, pool: PagePool, memory: Callable[[int], HostBuffer], new_key: Callable[[], str]
    ) -> None:
        stranger = memory(SIZE)
        for call in (pool.get, pool.put):
            with pytest.raises((ValueError, AssertionError)):
                call([new_key()], stranger, [0], [SIZE])

    def test_registering_twice_is_refused_and_the_first_stays(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        with pytest.raises(PoolError):
            pool.register(buffer)
        assert states(pool.put([new_key()], buffer, [0], [SIZE])) == [KeyState.OK]

    def test_unregistering_is_idempotent_and_can_be_undone(
        self, pool: PagePool, memory: Callable[[int], HostBuffer], new_key: Callable[[], str]
    ) -> None:
        made = memory(SIZE)
        pool.unregister(made)
        pool.register(made)
        pool.unregister(made)
        pool.unregister(made)
        pool.register(made)
        assert states(pool.put([new_key()], made, [0], [SIZE])) == [KeyState.OK]
        pool.unregister(made)

    def test_M3_it_says_once_and_for_all_whether_it_lets_go_when_a_call_returns(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str]
    ) -> None:
        said = pool.lets_go_at_return
        assert isinstance(said, bool)
        pool.get([new_key()], buffer, [0], [SIZE])
        assert pool.lets_go_at_return is said

    def test_M3_memory_that_was_unregistered_is_as_any_other(
        self, pool: PagePool, memory: Callable[[int], HostBuffer], new_key: Callable[[], str]
    ) -> None:
        made, absent = memory(SIZE), new_key()
        pool.register(made)
        pool.get([absent], made, [0], [SIZE])
        pool.unregister(made)
        write(made, 0, value(7))
        assert read(made, 0) == value(7)
        for call in (pool.get, pool.put):
            with pytest.raises((ValueError, AssertionError)):
                call([absent], made, [0], [SIZE])

    def test_R2_describe_names_a_place_for_each_key_in_order_and_none_for_what_is_not_there(
        self, pool: PagePool, buffer: HostBuffer, new_key: Callable[[], str], begin_write: Callable[[str], None]
    ) -> None:
        there, absent, unfinished, also_there = new_key(), new_key(), new_key(), new_key()
        begin_write(unfinished)
        pool.put([there, also_there], buffer, [0, SIZE], [SIZE, SIZE - 1])
        one, none, writing, other = pool.describe([there, absent, unfinished, also_there])
        assert none is None
        assert writing is None or not writing.complete
        assert one is not None
        assert other is not None
        assert (one.size, one.complete, other.size, other.complete) == (SIZE, True, SIZE - 1, True)
        assert one.endpoint
        assert one.address + SIZE <= other.address or other.address + SIZE - 1 <= one.address
        assert list(pool.describe([also_there, there])) == [other, one], "they stay where they are"
        assert list(pool.describe([])) == []

    def test_use_after_close_is_an_error_and_never_a_crash(
        self, closed_pool: PagePool, memory: Callable[[int], HostBuffer], new_key: Callable[[], str]
    ) -> None:
        made = memory(SIZE)
        with pytest.raises(NotOpenError):
            closed_pool.probe([new_key()])
        with pytest.raises(NotOpenError):
            closed_pool.describe([new_key()])
        with pytest.raises(NotOpenError):
            closed_pool.get([new_key()], made, [0], [SIZE])
        with pytest.raises(NotOpenError):
            closed_pool.put([new_key()], made, [0], [SIZE])
        with pytest.raises(NotOpenError):
            closed_pool.register(made)

    def test_closing_twice_and_unregistering_afterwards_change_nothing(
        self, closed_pool: PagePool, memory: Callable[[int], HostBuffer]
    ) -> None:
        closed_pool.unregister(memory(SIZE))
        closed_pool.close()
        with pytest.raises(NotOpenError):
            closed_pool.probe([])


def value(seed: int, size: int = SIZE) -> bytes:
    """Bytes that belong to no other seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def states(answers: Sequence[KeyAnswer]) -> list[KeyState]:
    """The answers without their codes, which differ from store to store."""
    return [answer.state for answer in answers]


def write(buffer: HostBuffer, offset: int, data: bytes) -> None:
    """Put bytes into a buffer, as the host does."""
    buffer.view()[offset : offset + len(data)] = data


def read(buffer: HostBuffer, offset: int, size: int = SIZE) -> bytes:
    """Bytes of a buffer, as the host sees them."""
    return bytes(buffer.view()[offset : offset + size])
