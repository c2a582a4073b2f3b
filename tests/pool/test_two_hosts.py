"""A pool of two hosts, or containers: what lies on this host is read from memory, the rest comes through the store (R1, R4).

Collected where the kernel lets this user make namespaces (see conftest.py).
"""

import json
import subprocess

import pytest

from akv_testing.hosts import host_command

pytestmark = pytest.mark.mooncake

#: What each script begins with: a server with `BLOCKS` pages of a prompt and room for as many.
SERVER = """
import json, sys
import anyio, torch
import akv
from akv.values.layout import LayerGroup, Layout, Region
from akv_testing import hosts

BLOCKS, T, MIB = 24, 4, 1 << 20
TOKENS = list(range(BLOCKS * T))
REGIONS = (192 << 10, 64 << 10)
LAYOUT = Layout(
    tokens_per_block=T,
    groups=(
        LayerGroup(
            layers=(0,), dtype="uint8", kv_heads=1, head_size=1,
            regions=tuple(Region(name=str(index), bytes_per_page=size) for index, size in enumerate(REGIONS)),
        ),
    ),
)

def make_caches():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (2 * BLOCKS, size), dtype=torch.uint8, generator=generator) for size in REGIONS]

def serving(port, host, caches, lends):
    store = {"master_address": f"{hosts.FIRST}:{port}", "local_hostname": host, "segment_bytes": lends * MIB}
    store["segment_memory"] = "memfd"
    return akv.open_connector(
        {"model_key": "two-hosts", "store": store, "staging_buffer_bytes": 64 * MIB, "load_deadline_s": 30.0}, LAYOUT, [caches]
    )

async def save(kv, blocks):
    request = kv.open_request("save", TOKENS[: blocks * T], reads_cache=False)
    scheduled = akv.Scheduled(request=request, computed_before=0, tokens=blocks * T, pages=[list(range(blocks))])
    await kv.after_forward(kv.plan_pass([scheduled]))
    request.finish()
    await request.finished()
"""

#: Arguments: the master's port, the address of its host, how many blocks it saves, whether it plugs in ("first": no) and has
#: shared memory of its own ("apart"). It lends 32 MiB, saves there when it is told to, and waits until its input ends.
HOLDER = (
    SERVER
    + """
port, host, blocks, where = sys.argv[1:]
if where != "first":
    hosts.plug_in(own_shared_memory=where == "apart")
sys.stdin.readline()

async def main():
    async with serving(port, host, make_caches(), 32) as kv:
        await save(kv, int(blocks))
        print("saved", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)

anyio.run(main)
"""
)

#: Arguments: the holder's script, whether the second host has shared memory of its own ("apart") or not ("together"), whether
#: it has processes of its own. The first half of the prompt lies on the second host, the other half on this one. It prints
#: what its last load read, and why entries of the register were refused.
READER = (
    SERVER
    + """
import subprocess
from akv.pool.register import read_register, register_directory
from akv.settings import StoreSettings
from akv_testing.master import running_master

holder, where, own_processes = sys.argv[1:]
hosts.settle_in(own_shared_memory=True)

async def load(kv, caches, name):
    for cache in caches:
        cache[BLOCKS:] = 1
    before = kv.pressure().reads
    request = kv.open_request(name, [*TOKENS, 1])
    offer = await request.lookup()
    assert offer.tokens == len(TOKENS), offer
    await request.reserve(offer, offer.tokens, [list(range(2 * BLOCKS - 1, BLOCKS - 1, -1))]).wait()
    await request.cancel()
    for cache in caches:
        assert torch.equal(cache[:BLOCKS], cache[BLOCKS:].flip(0)), "wrong bytes"
    after = kv.pressure().reads
    staged = {reason: count - before.staged.get(reason, 0) for reason, count in after.staged.items()}
    return {"direct": after.direct_pages - before.direct_pages, **{key: count for key, count in staged.items() if count}}

async def main(port):
    caches = make_caches()
    async with serving(port, hosts.FIRST, caches, 0) as kv:
        # Until all that can be mapped is.
        with anyio.fail_after(20.0):
            last = await load(kv, caches, "first")
            while not last["direct"] or "not_mapped" in last:
                await anyio.sleep(0.1)
                last = await load(kv, caches, f"{last}")
        refused = read_register(register_directory(StoreSettings())).refused
        print(json.dumps({"last": last, "refused": [entry.fault for entry in refused]}))

def have_saved(process):
    print(file=process.stdin, flush=True)
    assert process.stdout.readline(), "a server ended"

with running_master("--rpc_address=0.0.0.0") as (address, _):
    port = address.rpartition(":")[2]
    with hosts.second_host(holder, port, hosts.SECOND, "12", where, own_processes=own_processes == "yes") as there:
        command = [sys.executable, "-c", holder, port, hosts.FIRST, "24", "first"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as here:
            have_saved(there)
            have_saved(here)
            anyio.run(main, port)
            here.stdin.close()
"""
)


#: One process lends, and another one of the same user, which gave its capabilities up, reads the register.
LESSER = """
import subprocess, sys
from pathlib import Path
from akv.pool.register import open_register, read_register, register_directory
from akv.pool.segments import LentSegments
from akv.settings import StoreSettings
from akv_testing import hosts

if sys.argv[1] == "lend":
    hosts.settle_in(own_shared_memory=True)
    lent = LentSegments(StoreSettings(segment_bytes=1 << 20, segment_memory="memfd"))
    lent.claim()
    class Client:
        def mount_segment(self, path, size, *arguments):
            import mmap, os
            descriptor = os.open(path, os.O_RDWR)
            self.kept = mmap.mmap(descriptor, size)
            return {"ret": 0}
        def get_hostname(self):
            return "127.0.0.1:2"
    client = Client()
    lent.mount(client)
    lent.publish("127.0.0.1:1")
    for flags in (["--inh-caps=-all"], ["--bounding-set=-all", "--inh-caps=-all"]):
        subprocess.run(["setpriv", *flags, sys.executable, "-c", sys.argv[2], "read"], check=True)
else:
    found = read_register(register_directory(StoreSettings()))
    print(len(found.usable), [entry.fault.value for entry in found.refused])
"""


def test_R3_X5_a_process_that_the_kernel_lets_not_look_into_the_owner_does_not_read_it_and_is_told_why() -> None:
    done = subprocess.run(host_command(LESSER, "lend", LESSER), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["1 []", "0 ['hidden']"]


#: A container as Docker makes them: 64 MiB of shared memory.
CONTAINER = """
import subprocess
from akv.errors import PoolError
from akv.pool.segments import LentSegments
from akv.settings import StoreSettings
from akv_testing import hosts

hosts.settle_in(own_shared_memory=True)
subprocess.run(["mount", "-o", "remount,size=64m", "/dev/shm"], check=True)
for kind in ("file", "memfd"):
    lent = LentSegments(StoreSettings(segment_bytes=128 << 20, segment_memory=kind))
    try:
        lent.claim()
    except PoolError as error:
        print(error)
    else:
        print(kind, [entry.size for entry in lent.entries])
    lent.remove()
"""


def test_R3_a_container_s_shared_memory_that_is_too_small_is_named_with_the_figures_and_the_fix() -> None:
    done = subprocess.run(host_command(CONTAINER), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    refused, lent = done.stdout.splitlines()
    for said in (
        f"{128 << 20} bytes",
        "shared memory at /dev/shm",
        f"of {64 << 20} bytes are free",
        "docker run --shm-size=2g",
    ):
        assert said in refused
    # Files without a name need none.
    assert lent == f"memfd [{128 << 20}]"


def reads(where: str, own_processes: str) -> dict[str, object]:
    """What a reader on the first host says."""
    command = host_command(READER, HOLDER, where, own_processes)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_R1_R4_pages_of_another_host_are_staged_and_those_of_this_one_read_from_memory_in_one_load() -> None:
    told = reads("apart", "yes")
    assert told["last"] == {"direct": 12, "not_shared": 12}
    assert told["refused"] == []


@pytest.mark.parametrize(
    ("where", "own_processes", "last", "refused"),
    [
        # As with a common /dev/shm and a common namespace of process ids: networks alone are apart.
        ("together", "no", {"direct": 24}, []),
        # A common /dev/shm alone: whether the owner lives cannot be known, nor what it has mapped where.
        ("together", "yes", {"direct": 12, "not_shared": 12}, ["owner_unknown"]),
        # A common namespace of process ids alone: the register of the one is not seen by the other.
        ("apart", "no", {"direct": 12, "not_shared": 12}, []),
    ],
)
def test_R3_X5_a_container_s_pages_are_read_from_memory_if_it_has_shared_memory_and_processes_in_common(
    where: str, own_processes: str, last: dict[str, int], refused: list[str]
) -> None:
    told = reads(where, own_processes)
    assert told["last"] == last
    assert told["refused"] == refused
