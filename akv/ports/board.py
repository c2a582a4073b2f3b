"""Where a connector posts what it counted, for `akv stat`."""

from typing import Protocol

from akv.values.stats import ConnectorStats


class StatBoard(Protocol):
    """One connector's place on this host. It ends with who made it, or with the process."""

    def post(self, stats: ConnectorStats) -> None:
        """Put this in the place of what was posted before. Blocks, briefly, so it is called through a `CallRunner`. Raises
        OSError.
        """
        ...
