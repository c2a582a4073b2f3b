"""A process that lends memory to a pool until its input ends: `python -m akv.cli.bench.faults.lender ADDRESS BYTES`.

It says so in one line. A third argument is the size of a segment. Whoever stores pages while nobody else lends has them here.
"""

import sys

import anyio
from anyio import to_thread

from akv.pool import open_pool
from akv.settings import Settings, StoreSettings


async def _lend(address: str, segment_bytes: int, file_bytes: int) -> None:
    store = StoreSettings(master_address=address, segment_bytes=segment_bytes, segment_file_bytes=file_bytes)
    async with open_pool(Settings(model_key="bench", store=store)):
        sys.stdout.write("lent\n")
        sys.stdout.flush()
        await to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(_lend, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1024**3)
