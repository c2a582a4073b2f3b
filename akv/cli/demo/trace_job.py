"""From the options of `akv demo --trace` to what is replayed, or to the reason why not."""

import math
from pathlib import Path

from akv.cli.demo.jobs import TraceJob
from akv.cli.demo.scaling import scaled_lengths
from akv.cli.demo.setting import TRACE_MAX_TOKENS, TRACE_TOKENS_PER_BLOCK
from akv.cli.demo.trace import TRACE_BLOCK_TOKENS, TraceError, read_trace
from akv.errors import SettingsError

#: Scales at which a block of the trace is a whole number of the engine's.
SCALES = tuple(1 << n for n in range((TRACE_BLOCK_TOKENS // TRACE_TOKENS_PER_BLOCK).bit_length()))
#: A block of the trace becomes one of the engine's: the smallest replay.
DEFAULT_SCALE = SCALES[-1]
#: 200 requests of the published conversation trace follow each other within 72 s: at this, within 7. The computing is smaller
#: by more than that, and still takes long enough for requests to overlap.
DEFAULT_SPEED = 10.0


def open_trace(path: Path, requests: int | None, scale: int, speed: float) -> TraceJob:
    """Read a trace and check that it can be replayed. Blocks; starts nothing.

    Raises TraceError (fault of the file, with its line), SettingsError (fault of whoever chose scale and speed).
    """
    if scale not in SCALES:
        fix = f"Use one of {', '.join(map(str, SCALES))}."
        raise SettingsError("--scale", scale, "a block of the trace has to become whole blocks of the engine", fix)
    if not (speed > 0 and math.isfinite(speed)):
        raise SettingsError("--speed", speed, "it divides the times of the trace", "Use a number above 0.")
    rows = read_trace(path, requests)
    for line, row in enumerate(rows, 1):
        needed = sum(scaled_lengths(row, scale))
        if needed > TRACE_MAX_TOKENS:
            why = (
                f"at a scale of {scale} the request has {needed:,} tokens, and the replaying model takes {TRACE_MAX_TOKENS:,}"
            )
            raise TraceError(path, line, f"{why}: a larger --scale may fit, at most {SCALES[-1]}")
    return TraceJob(rows=rows, scale=scale, speed=speed)
