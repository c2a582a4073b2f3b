"""Runs one program and ends it when the parent process ends, however the parent ends.

A script of its own, run by its path with `python -I -S`: it imports nothing of akv, starts in a few milliseconds, and has one
thread. Linux's parent-death signal follows the *thread* that started a child, and event loops start children from worker
threads, so the parent cannot use it; here there is one thread, so it is safe for the program that this watcher starts.

The parent holds the other end of stdin. End of file means that it has closed it or is gone; a forked child of the parent may
hold it open too, so the parent's process id is looked at as well. The program's output goes nowhere but into a short memory of
its last lines, which the watcher prints as it ends: the parent quotes them if the program would not start.

Usage: watcher.py PARENT_PID PROGRAM [ARGUMENT...]; the exit status is the program's (128 + signal if one ended it).
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections import deque
from typing import IO

#: Seconds between two looks at the parent's process id, which nothing announces to a process that is not its parent.
PARENT_CHECK_S = 0.25
#: Lines of the program's output that are remembered, and characters of each: the sum fits in a pipe that nobody reads.
LINES_KEPT = 12
LINE_CHARACTERS = 500

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Run `command` until it ends or `parent` does; print the last lines it wrote; return its exit status."""
    watcher = os.getpid()
    libc = ctypes.CDLL(None)

    def die_with_watcher() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:  # It died before the line above took hold.
            os._exit(1)

    with subprocess.Popen(  # noqa: S603 - the command is akv's own
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_watcher,  # noqa: PLW1509 - unsafe beside other threads, of which there are none here
    ) as program:
        try:
            lines = _watch(parent, program.stdout)
        finally:
            # Killed outright: its state is memory that nobody can reach any more, and a stopped process ignores SIGTERM.
            program.kill()
    sys.stdout.write("\n".join(lines) + "\n")
    status = program.returncode
    return status if status >= 0 else 128 - status


def _watch(parent: int, stream: "IO[bytes] | None") -> list[str]:
    """Wait for the end of the parent or of the program's output, and return the last lines of that output."""
    if stream is None:
        return []  # Not with a pipe, as above.
    output = stream.fileno()
    lines: deque[str] = deque(maxlen=LINES_KEPT)
    rest = b""
    while os.getppid() == parent:
        readable, _, _ = select.select([0, output], [], [], PARENT_CHECK_S)
        if output in readable:
            chunk = os.read(output, 65536)
            if not chunk:
                break
            *whole, rest = (rest + chunk).split(b"\n")
            lines.extend(line.decode(errors="replace")[:LINE_CHARACTERS] for line in whole)
            rest = rest[:LINE_CHARACTERS]
        if 0 in readable and not os.read(0, 4096):
            break
    return [*lines, rest.decode(errors="replace")] if rest else list(lines)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
