"""Other processes of this machine, for tests that kill and freeze them: read from Linux's /proc, where threads come and go."""

import os
import signal
from pathlib import Path

#: What a process or thread that ends between two looks raises: from the open, or from the read.
_GONE = (FileNotFoundError, ProcessLookupError)


def children_of(pid: int) -> list[int]:
    """The children of a process, those of each of its threads: none once it has gone."""
    return [int(child) for text in _of_each_thread(pid, "children") for child in text.split()]


def command_of(pid: int) -> list[str]:
    """The command line that a process was started with. Nothing but an empty word for one that ended and was not waited for.

    While a program is being put in the place of another it has none for an instant: that is waited out.
    """
    while not (text := Path(f"/proc/{pid}/cmdline").read_text()) and not _stands_still(pid):
        os.sched_yield()
    return text.split("\0")


def halt(pid: int, number: int = signal.SIGSTOP) -> None:
    """Stop or kill a process, and return when none of its threads runs any more: a signal alone only asks for it.

    Blocks for that long, some microseconds as a rule. SIGCONT lets a stopped process go on.
    """
    os.kill(pid, number)
    while not _stands_still(pid):
        os.sched_yield()


def _stands_still(pid: int) -> bool:
    # Zombies and dead threads are still for good.
    return all(stat.rpartition(")")[2].split()[0] in "TZX" for stat in _of_each_thread(pid, "stat"))


def _of_each_thread(pid: int, name: str) -> list[str]:
    texts = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except _GONE:
        return []
    for thread in threads:
        try:
            texts.append((thread / name).read_text())
        except _GONE:
            continue
    return texts
