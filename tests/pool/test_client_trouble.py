"""What a real store answers when it is in trouble: leases, dead and frozen processes, and how long each answer takes."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from akv.pool import MooncakePool, set_up_store
from akv.ports.device import HostBuffer
from akv.ports.pool import KeyAnswer, KeyState
from akv.settings import StoreSettings

pytestmark = pytest.mark.mooncake

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PAGE = 1000


@pytest.fixture
def buffer(pool: MooncakePool, memory: Callable[[int], HostBuffer]) -> Iterator[HostBuffer]:
    made = memory(8 * PAGE)
    pool.register(made)
    yield made
    pool.unregister(made)


def test_a_leased_value_is_removed_and_a_missing_one_is_missing(
    pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str]
) -> None:
    key, absent = new_key(), new_key()
    pool.put([key], buffer, [0], [PAGE])
    assert pool.probe([key]) == [KeyAnswer(KeyState.OK, 1)], "which leases it"
    assert pool.remove([key, absent]) == [KeyAnswer(KeyState.OK, 0), KeyAnswer(KeyState.MISSING, -704)]
    assert pool.probe([key]) == [KeyAnswer(KeyState.MISSING, 0)]


def test_S5_a_key_that_is_being_written(
    pool: MooncakePool, buffer: HostBuffer, new_key: Callable[[], str], begin_write: Callable[[str], None]
) -> None:
    key = new_key()
    begin_write(key)
    assert pool.put([key], buffer, [0], [100]) == [KeyAnswer(KeyState.OK, 0)]
    assert pool.probe([key]) == [KeyAnswer(KeyState.MISSING, 0)]
    assert pool.get([key], buffer, [0], [100]) == [KeyAnswer(KeyState.MISSING, -703)]
    assert pool.remove([key]) == [KeyAnswer(KeyState.REFUSED, -703)]
    client = pool._client
    assert client.batch_put_session_revoke([key]) == [0]  # type: ignore[attr-defined]
    assert pool.put([key], buffer, [0], [100]) == [KeyAnswer(KeyState.OK, 0)]
    assert pool.get([key], buffer, [0], [100]) == [KeyAnswer(KeyState.OK, 100)]


def test_the_form_of_a_call_is_answered_for_every_key(pool: MooncakePool, buffer: HostBuffer) -> None:
    # The adapter lets no such call out; this is what the client would say, and what the adapter would make of it.
    client = pool._client
    assert client.batch_get_into(["a", "b"], [buffer.address], [1]) == [-600, -600]
    assert client.batch_put_from(["a", "b"], [buffer.address], [1]) == [-600, -600]
    assert client.batch_put_from(["a"], [buffer.address], [0]) == [-600]
    assert client.register_buffer(buffer.address + 1, 1) == -600
    assert client.register_buffer(0, 1) == client.register_buffer(buffer.address, 0) == -600


def test_D4_a_get_that_outlasts_its_lease_is_no_hit_though_bytes_came(
    hasty_master: str, memory: Callable[[int], HostBuffer]
) -> None:
    size, count = 4 << 20, 8
    hasty = set_up_store(StoreSettings(master_address=hasty_master, segment_bytes=64 << 20, local_buffer_bytes=0))
    buffer = memory(count * size)
    hasty.register(buffer)
    keys, offsets = [str(number) for number in range(count)], [number * size for number in range(count)]
    assert {answer.state for answer in hasty.put(keys, buffer, offsets, [size] * count)} == {KeyState.OK}
    answers = hasty.get(keys, buffer, offsets, [size] * count)
    hasty.close()
    assert answers == [KeyAnswer(KeyState.LEASE_EXPIRED, -707)] * count


#: Arguments: the master's address. It lends memory until its input ends.
LENDER = """
import sys
from akv.pool import set_up_store
from akv.settings import StoreSettings
pool = set_up_store(StoreSettings(master_address=sys.argv[1], segment_bytes=16 << 20))
print("lent", flush=True)
sys.stdin.read()
pool.close()
"""

#: Arguments: the master's address, a process id, the signal that it gets. Prints each call's answers, and seconds.
BESIDE = """
import os, sys, time
import anyio
from akv.pool import open_pool
from akv.settings import Settings, StoreSettings
from akv_testing.memory import FakeHostBuffer
from akv_testing.processes import halt

address, pid, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def timed(name, call):
    began = time.monotonic()
    answers = call()
    print(name, answers[0].state.value, answers[0].code, time.monotonic() - began, flush=True)

async def main():
    store = StoreSettings(master_address=address, segment_bytes=0, local_buffer_bytes=0)
    async with open_pool(Settings(model_key="m", store=store)) as pool:
        buffer = FakeHostBuffer(2000)
        pool.register(buffer)
        assert pool.put(["a"], buffer, [0], [1000])[0].code == 0
        halt(pid, number)
        timed("probe", lambda: pool.probe(["a"]))
        timed("get", lambda: pool.get(["a"], buffer, [1000], [1000]))
        timed("put", lambda: pool.put(["b"], buffer, [0], [1000]))

anyio.run(main)
os._exit(0)
"""

Told = dict[str, tuple[str, int, float]]


def told(ended: "subprocess.CompletedProcess[str]") -> Told:
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [row.split() for row in ended.stdout.splitlines()]
    return {name: (state, int(code), float(seconds)) for name, state, code, seconds in rows}


def test_O7_a_frozen_master_costs_each_call_what_the_settings_say(
    own_master: tuple[str, int], lender: Callable[..., AbstractContextManager[object]], run_script: Run
) -> None:
    address, pid = own_master
    with lender(LENDER, address):
        try:
            answers = told(run_script(BESIDE, address, str(pid), str(int(signal.SIGSTOP))))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert {state for state, _, _ in answers.values()} == {"unavailable"}
    assert {code for _, code, _ in answers.values()} <= {-900, -901}
    assert max(seconds for _, _, seconds in answers.values()) < 5.0, "the client's own limit is 30 seconds"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_O7_a_dead_or_frozen_holder_costs_a_bounded_time_and_is_no_dead_master(
    number: signal.Signals,
    own_master: tuple[str, int],
    lender: Callable[..., AbstractContextManager["subprocess.Popen[str]"]],
    run_script: Run,
) -> None:
    with lender(LENDER, own_master[0]) as holder:
        try:
            answers = told(run_script(BESIDE, own_master[0], str(holder.pid), str(int(number))))
        finally:
            holder.send_signal(signal.SIGCONT)
    assert answers["probe"][:2] == ("ok", 1), "the master does not know yet"
    assert answers["get"][0] in {"holder_lost", "lease_expired"}
    assert answers["put"][0] in {"holder_lost", "no_space"}
    if number == signal.SIGKILL:
        assert answers["get"][:2] == answers["put"][:2] == ("holder_lost", -800)
    assert max(seconds for _, _, seconds in answers.values()) < 12.0, "the client's own limit is 30 to 62 seconds"


OPERATOR = (
    """
import os, sys
os.environ["MC_RPC_TIMEOUT_MS"] = "700"
"""
    + BESIDE
)


def test_O7_the_operators_own_variable_wins(
    own_master: tuple[str, int], lender: Callable[..., AbstractContextManager[object]], run_script: Run
) -> None:
    address, pid = own_master
    with lender(LENDER, address):
        try:
            answers = told(run_script(OPERATOR, address, str(pid), str(int(signal.SIGSTOP))))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert answers["probe"][0] == "unavailable"
    assert 0.6 < answers["probe"][2] < 1.4, "akv's own is 1.5 seconds"
