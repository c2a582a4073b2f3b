"""A place where connectors post what they counted, in memory."""

from akv.values.stats import ConnectorStats


class FakeBoard:
    """Implements `akv.ports.board.StatBoard`."""

    def __init__(self) -> None:
        self.posts: list[ConnectorStats] = []
        #: Raised by `post()`, in turn, as long as there are any.
        self.errors: list[OSError] = []

    def post(self, stats: ConnectorStats) -> None:
        """As the port says."""
        if self.errors:
            raise self.errors.pop(0)
        self.posts.append(stats)
