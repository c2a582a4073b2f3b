"""What a pool's master says of the segments in it, over its HTTP interface (O3)."""

import urllib.request
from http.client import HTTPException
from urllib.parse import quote

import msgspec

from akv.errors import PoolError

#: Seconds for one answer of a master, which gives it from memory.
_DEADLINE_S = 5.0


class Share(msgspec.Struct, frozen=True):
    """What one process has in the pool."""

    #: "host:port", as the master calls it.
    name: str
    used_bytes: int
    size_bytes: int


def ask_master(metrics_url: str) -> list[Share]:
    """The processes that lend to the pool. Raises PoolError for an address that is none, or where no master answers."""
    base = metrics_url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise PoolError(f"--metrics takes the URL of a master's HTTP interface, http://10.0.0.1:9003 say, not {metrics_url!r}")
    try:
        names = dict.fromkeys(_get(f"{base}/get_all_segments").split())
        return [_share(name, _get(f"{base}/query_segment?segment={quote(name, safe=':')}")) for name in names]
    except (OSError, HTTPException, ValueError) as error:
        raise PoolError(
            f"no master answers at {base} ({error}). It is the port of its metrics (--metrics_port, 9003 unless it was told "
            "otherwise), and not the one of store.master_address."
        ) from error


def _share(name: str, text: str) -> Share:
    # The name in a line of its own, then two lines as in `Capacity(bytes) : 67108864`.
    figures = {key.partition("(")[0]: int(value) for key, _, value in map(_halves, text.splitlines()[1:]) if value.strip()}
    if not {"Used", "Capacity"} <= figures.keys():
        raise ValueError(f"it says {text!r} of a segment")
    return Share(name, figures["Used"], figures["Capacity"])


def _halves(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_DEADLINE_S) as answer:  # noqa: S310 - of http or https, as was checked
        return str(answer.read().decode())
