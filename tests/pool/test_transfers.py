"""Entries in flight are counted over all threads, and no call goes past the bound."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from akv.pool.mooncake import KEYS_PER_TRANSFER, MooncakePool
from akv.pool.transfers import MOST_ENTRIES, QUEUE_VARIABLE, TransferBudget, entries_allowed
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState


class Transfers:
    """A client that notes how many entries are inside it together."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return 0

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        with self.lock:
            self.inside += len(keys)
            self.most = max(self.most, self.inside)
        self.wait()
        with self.lock:
            self.inside -= len(keys)
        return sizes

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        return [0 for _ in self.batch_get_into(keys, buffer_ptrs, sizes)]


def many(pool: MooncakePool, buffer: HostBuffer, count: int, call: str = "get") -> list[KeyAnswer]:
    answers: list[KeyAnswer] = getattr(pool, call)(
        [str(index) for index in range(count)], buffer, list(range(count)), [1] * count
    )
    return answers


def pool_of(client: Transfers, budget: TransferBudget, buffer: HostBuffer) -> MooncakePool:
    pool = MooncakePool(client, "127.0.0.1:1", budget=budget)  # type: ignore[arg-type]
    pool.register(buffer)
    return pool


def test_the_default_bound_is_below_what_wedges_a_peer() -> None:
    assert 2 * KEYS_PER_TRANSFER <= TransferBudget().limit < 2052


@pytest.mark.parametrize(
    ("in_force", "entries"),
    [({}, MOST_ENTRIES), ({QUEUE_VARIABLE: "65535"}, MOST_ENTRIES), ({QUEUE_VARIABLE: "100"}, 100)]
    + [({QUEUE_VARIABLE: odd}, MOST_ENTRIES) for odd in ("", "0", "-1", "many", "²")],
)
def test_the_bound_follows_the_clients_own_down_and_never_up(in_force: dict[str, str], entries: int) -> None:
    assert entries_allowed(in_force) == entries


def test_a_bound_is_lowered_and_not_raised_again() -> None:
    budget = TransferBudget(100)
    for wanted, limit in ((50, 50), (80, 50), (0, 1)):
        budget.lower_to(wanted)
        assert budget.limit == limit


@pytest.mark.parametrize("call", ["get", "put"])
def test_calls_of_many_threads_and_stores_stay_within_one_bound(call: str, memory: Callable[[int], HostBuffer]) -> None:
    buffer, budget = memory(1000), TransferBudget(600)
    client = Transfers(wait=lambda: threading.Event().wait(0.001))
    pools = [pool_of(client, budget, buffer), pool_of(client, budget, buffer)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda number: many(pools[number % 2], buffer, 900, call), range(24)))
    assert {answer.state for part in answers for answer in part} == {KeyState.OK}
    assert 2 * KEYS_PER_TRANSFER <= client.most <= 600, "two calls at a time, and no third"
    assert (budget.in_flight, budget.most_in_flight) == (0, client.most)


def test_a_bound_below_a_call_makes_smaller_calls(memory: Callable[[int], HostBuffer]) -> None:
    buffer, client = memory(1000), Transfers()
    assert len(many(pool_of(client, TransferBudget(100), buffer), buffer, 950)) == 950
    assert client.most == 100


def test_a_call_whose_turn_does_not_come_is_unavailable_and_moves_nothing(memory: Callable[[int], HostBuffer]) -> None:
    buffer, budget = memory(1000), TransferBudget(300, wait_s=0.01)
    client = Transfers()
    pool = pool_of(client, budget, buffer)
    with budget.hold(100) as granted:
        assert granted
        assert many(pool, buffer, 600) == [KeyAnswer(KeyState.UNAVAILABLE)] * 600
    assert client.most == 0
    assert {answer.state for answer in many(pool, buffer, 600)} == {KeyState.OK}, "and it left no place in the queue"


def test_more_entries_than_the_bound_go_alone() -> None:
    budget = TransferBudget(10, wait_s=0.01)
    with budget.hold(11) as granted, budget.hold(1) as beside:
        assert (granted, beside) == (True, False)


def test_who_gives_up_leaves_the_others_their_places() -> None:
    budget, served = TransferBudget(10, wait_s=5), threading.Event()

    def take() -> None:
        with budget.hold(5) as granted:
            if granted:
                served.set()

    with budget.hold(10):
        first = threading.Thread(target=take)
        first.start()
        while not budget._queue:
            threading.Event().wait(0.001)
        budget._wait_s = 0.01
        with budget.hold(1) as granted:
            assert not granted
        assert len(budget._queue) == 1
    assert served.wait(5)
    first.join(5)


def test_who_asks_first_is_served_first() -> None:
    budget = TransferBudget(10)
    order: list[str] = []

    def take(name: str, entries: int) -> None:
        with budget.hold(entries):
            order.append(name)

    with budget.hold(8):
        threads = []
        for place, (name, entries) in enumerate((("large", 9), ("small", 1)), 1):
            threads.append(thread := threading.Thread(target=take, args=(name, entries)))
            thread.start()
            while len(budget._queue) < place:
                threading.Event().wait(0.001)
        assert order == [], "the small one does not overtake"
    for thread in threads:
        thread.join(5)
    assert order == ["large", "small"]


def test_what_a_failed_call_held_is_given_back() -> None:
    budget = TransferBudget(10)
    with pytest.raises(ZeroDivisionError), budget.hold(10):
        raise ZeroDivisionError
    assert budget.in_flight == 0


#: Sixteen threads on one peer, small pages, with the client's own limit in force. Arguments: the master's address.
CROWD = """
import os, subprocess, sys, threading
os.environ.pop("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", None)
from concurrent.futures import ThreadPoolExecutor
from akv.pool import set_up_store
from akv.pool.transfers import PROCESS_BUDGET
from akv.settings import StoreSettings
from akv_testing.memory import FakeHostBuffer

address, THREADS, PAGES, SIZE = sys.argv[1], 16, 512, 64
lend = "import sys; from akv.pool import set_up_store as s; from akv.settings import StoreSettings as S;"
lend += f"p = s(S(master_address={address!r}, segment_bytes=64 << 20)); print('lent', flush=True); sys.stdin.read(); p.close()"
with subprocess.Popen([sys.executable, "-c", lend], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as donor:
    assert donor.stdout.readline() == b"lent\\n"
    pool = set_up_store(StoreSettings(master_address=address, segment_bytes=0, local_buffer_bytes=0))
    buffer = FakeHostBuffer(THREADS * PAGES * SIZE)
    pool.register(buffer)
    whole = range(0, PAGES * SIZE, SIZE)
    offsets = [[thread * PAGES * SIZE + offset for offset in whole] for thread in range(THREADS)]
    keys = [[f"crowd/{thread}/{page}" for page in range(PAGES)] for thread in range(THREADS)]
    content = b"".join(offset.to_bytes(SIZE, "little") for mine in offsets for offset in mine)
    buffer.host_write(0, content)
    together = threading.Barrier(THREADS)
    def work(thread):
        together.wait()
        calls = [pool.put, pool.get, pool.get]
        return {answer.state.value for call in calls for answer in call(keys[thread], buffer, offsets[thread], [SIZE] * PAGES)}
    with ThreadPoolExecutor(THREADS) as threads:
        print(sorted(set().union(*threads.map(work, range(THREADS)))))
    print(buffer.host_read(0, len(content)) == content, PROCESS_BUDGET.most_in_flight > 1024)
    pool.close()
    donor.stdin.close()
"""


@pytest.mark.mooncake
def test_a_crowd_of_threads_on_one_peer_wedges_nothing(own_master: tuple[str, int], run_script: Callable[..., object]) -> None:
    ended = run_script(CROWD, own_master[0], timeout_s=60.0)
    assert getattr(ended, "stdout", "") == "['ok']\nTrue True\n", getattr(ended, "stderr", "")[-2000:]
