"""The store client's log lines, turned into events instead of text on the server's standard error (X6).

The client logs through a glog library that its wheel brings for itself. glog can write to a file instead of to standard error,
and decides that at each line, so the lines go to a file in a private directory, unlinked once it exists: nothing is left
behind however the process ends. After each store call, what was added is read, turned into events and freed.

Standard error itself stays untouched. Piping descriptor 2 through a reader was rejected: a reader that is a thread cannot run
while `setup()` and `close()` hold the interpreter lock, so a full pipe would stop the process for good; and one that is a
process makes a pipe of a terminal (programs turn colours and progress bars off) and puts every other writer's last words, a
crash's traceback among them, at its mercy.
"""

import atexit
import contextlib
import ctypes
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from akv.observe import POOL_CLIENT_LINE, POOL_CLIENT_LOG, emit
from akv.pool.exit_guard import PROCESS_GUARD

#: "E1130 03:17:50.291244 20289 real_client.cpp:6693] text", and in its first letter how severe the line is.
_LINE = re.compile(r"(?P<severity>[IWEF])\d{4} [\d:.]+ +\d+ (?P<source>[^ \]]+)\] (?P<text>.*)")
_SEVERITIES = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
#: What may be a key, ours or another program's: a word with a slash, or with as many hexadecimal digits as half a hash has.
_WORD = re.compile(r"[^\s'\",;()\[\]]+")
_LIKE_A_KEY = re.compile(r"/|[0-9a-fA-F]{16}")
#: Places of the client's source that one reading tells apart; what else was logged is counted at the last of them.
_MOST_SOURCES = 8
#: Lines of one reading that are told as they are; a pool that is down logs three for each key.
_MOST_LINES = 100
#: Bytes of the file after which its beginning is given back to the system.
_FREE_EVERY = 1 << 20
#: Nanoseconds for which a folder's time says nothing of what has been put there since: file systems mark changes by a clock
#: that ticks every few milliseconds, and some by one that ticks every two seconds.
_TICK_NS = 3_000_000_000

_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
#: glog's severities. A line goes to the destination of its own severity and to those of all below.
_INFO, _ABOVE_INFO, _FATAL = 0, (1, 2, 3), 3


class _Glog:
    """The glog of the client's wheel. Raises LookupError where it is not there, or not as it has to be."""

    def __init__(self) -> None:
        library = ctypes.CDLL(_private_glog())
        try:
            # C++ names; the library of another glog version may have others.
            self._is_initialised = library._ZN6google24glog_internal_namespace_26IsGoogleLoggingInitializedEv
            self._initialise = library._ZN6google17InitGoogleLoggingEPKc
            self._set_destination = library._ZN6google17SetLogDestinationEiPKc
            self._set_symlink = library._ZN6google13SetLogSymlinkEiPKc
            self._to_stderr = ctypes.c_bool.in_dll(library, "_ZN3fLB17FLAGS_logtostderrE")
            self._stderr_threshold = ctypes.c_int.in_dll(library, "_ZN3fLI21FLAGS_stderrthresholdE")
            self._buffered_level = ctypes.c_int.in_dll(library, "_ZN3fLI17FLAGS_logbuflevelE")
        except (AttributeError, ValueError) as error:
            raise LookupError("the client's glog is of another version") from error
        self._is_initialised.restype = ctypes.c_bool
        if self._is_initialised():
            # The operator told the client to write files of its own (MC_LOG_DIR).
            raise LookupError("the client's log has a destination already")
        self._initialise(b"mooncake")  # Without it every line goes to standard error. Once in a process: again, it aborts.
        for severity in (_INFO, *_ABOVE_INFO):
            self._set_symlink(severity, b"")
            self._set_destination(severity, b"")
        self._buffered_level.value = -1
        self.write_to_stderr()

    def write_to(self, folder: Path) -> None:
        """Lines go to a file that glog makes in `folder` when there is the first one."""
        self._set_destination(_INFO, f"{folder}/".encode())
        self._stderr_threshold.value = _FATAL  # What precedes an abort is told by standard error too.
        self._to_stderr.value = False

    def write_to_stderr(self) -> None:
        """Lines go to standard error, as if nobody had touched glog; the file is closed."""
        self._to_stderr.value = True
        self._set_destination(_INFO, b"")


def _private_glog() -> str:
    """The path of the glog that the wheel brought and this process loaded. A glog that others share is not ours to turn."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            _, slash, path = line.rstrip("\n").partition("/")
            if "/libglog" in path and Path(path).parent.name.startswith("mooncake"):
                return slash + path
    raise LookupError("the client's wheel brought no glog of its own")


class ClientLog:
    """The client's log of this process, captured while somebody holds it. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._pid = 0
        self._glog: _Glog | None = None
        self._folder: Path | None = None
        #: The folder's time when it was listed last, once that is old enough to tell of any change since; else 0.
        self._listed = 0
        #: The file that glog writes, and up to where it was read.
        self._file = -1
        self._read_to = 0
        self._freed_to = 0
        self._rest = b""

    @property
    def is_captured(self) -> bool:
        """Whether the client's lines come here now."""
        return self._folder is not None

    def hold(self) -> bool:
        """Capture the client's lines from now on, until `release()`. After the client was imported, before it is set up.

        Says whether that works: it does not with a glog that others share, or if the operator gave the client a directory for
        its log. Then lines go where they went before, and nobody has to release anything.
        """
        with self._lock:
            if self._glog is None:
                try:
                    self._glog = _Glog()
                except LookupError:
                    return False
                atexit.register(self._at_exit)
                PROCESS_GUARD.before_leaving(self._at_exit)
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="akv-client-log-"))
                self._pid = os.getpid()
                self._glog.write_to(self._folder)
            self._holders += 1
            return True

    def release(self) -> None:
        """One holder less. After the last one the client writes to standard error again, and nothing of the file is left."""
        self.read()
        with self._lock:
            self._holders -= 1
            if self._holders or self._glog is None:
                return
            self._glog.write_to_stderr()
        self.read()
        with self._lock:
            self._forget()

    def read(self) -> None:
        """Turn what the client has logged since the last reading into events. Costs microseconds where it logged nothing."""
        if self._folder is None or os.getpid() != self._pid:
            return
        lines: list[str] = []
        # A folder that somebody cleared away, or no descriptor left: what watches a call must not change its answer (O7).
        with self._lock, contextlib.suppress(OSError):
            lines = self._new_lines()
        # Outside the lock: what listens to events may take its time.
        if lines:
            _tell(lines)

    def _at_exit(self) -> None:
        if self._folder is not None and os.getpid() == self._pid:
            self.read()
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def _new_lines(self) -> list[str]:
        self._find_file()
        if self._file < 0:
            return []
        size = os.fstat(self._file).st_size
        if size == self._read_to:
            return []
        data = self._rest + os.pread(self._file, size - self._read_to, self._read_to)
        self._read_to = size
        if size - self._freed_to >= _FREE_EVERY:
            _free(self._file, self._freed_to, size)
            self._freed_to = size
        *whole, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def _find_file(self) -> None:
        """Open the file that glog made, if it made one, and unlink it. It makes another when one has grown very large.

        Looks at the folder's time first: listing it takes many times as long, behind each store call, and gives the
        interpreter away at every step.
        """
        if self._folder is None or (changed := self._folder.stat().st_mtime_ns) == self._listed:
            return
        self._listed = changed if time.time_ns() - changed > _TICK_NS else 0
        for path in self._folder.iterdir():
            if self._file >= 0:
                os.close(self._file)
            self._file, self._read_to, self._freed_to, self._rest = os.open(path, os.O_RDWR | os.O_CLOEXEC), 0, 0, b""
            path.unlink()

    def _forget(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
        self._file, self._read_to, self._freed_to, self._rest, self._folder, self._listed = -1, 0, 0, b"", None, 0


def _free(file: int, begin: int, end: int) -> None:
    """Give the memory or disk behind a part of a file back. Not every file system can; then it is freed with the file."""
    fallocate: Callable[..., int] = ctypes.CDLL(None).fallocate64
    fallocate(file, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))


def _tell(lines: list[str]) -> None:
    """Events for some lines: one for each place of the client's source, and at level debug the lines themselves."""
    counts: dict[tuple[str, str], int] = {}
    texts: dict[tuple[str, str], str] = {}
    place = ("info", "unknown")
    for number, line in enumerate(lines):
        found = _LINE.fullmatch(line)
        if found is None and not texts:
            continue  # The file's own head.
        if found is not None:
            severity, source, text = _SEVERITIES[found["severity"]], found["source"], found["text"]
            if (severity, source) in texts:
                place = (severity, source)
            elif len(texts) < _MOST_SOURCES:
                place = (severity, source)
                texts[place] = _without_keys(text)
            if number < _MOST_LINES:
                emit(POOL_CLIENT_LINE, severity=severity, source=source, text=text)
        counts[place] = counts.get(place, 0) + 1
    for (severity, source), text in texts.items():
        emit(POOL_CLIENT_LOG, severity=severity, source=source, lines=counts[severity, source], text=text)


def _without_keys(text: str) -> str:
    return _WORD.sub(lambda word: "<key>" if _LIKE_A_KEY.search(word[0]) else word[0], text)


#: The log of this process's client: glog has one destination for all its stores.
CLIENT_LOG = ClientLog()
