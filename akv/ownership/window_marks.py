"""Which window pages of one request were handed over for saving (S2, S12).

A window page is offered in its own pass alone: the engine reuses it right after, so there is no mark that could step back.
What is kept here is only what `finish` must not list again, and what it may still list.
"""

from collections.abc import Iterable

from akv.plan.ending import WindowPages
from akv.values.messages import GroupPages


class WindowMarks:
    """The window pages of one request."""

    def __init__(self) -> None:
        #: The closing pass of the prompt has run.
        self.closed = False
        #: Tokens that had KV when the first pass began: matched locally, or loaded. None before that pass.
        self.began_at: int | None = None
        #: A load of this life was LOADED: the pool holds window pages of this prompt already.
        self.loaded = False
        #: For `finish`: the pages that the request holds behind its last pass, and that make its end resumable.
        self.held: tuple[WindowPages, ...] = ()
        self._queued: dict[int, set[int]] = {}

    def ran(self, before: int, held: tuple[WindowPages, ...], *, closes: bool) -> None:
        """A pass ran behind `before` tokens."""
        if self.began_at is None:
            self.began_at = before
        self.held = held
        self.closed = self.closed or closes

    def begin_incarnation(self) -> None:
        """The pages were taken away. The prompt's end is listed again by the pass that completes it again, as far as it was
        not saved.
        """
        self.closed, self.began_at, self.held = False, None, ()

    def open(self, columns: WindowPages) -> WindowPages:
        """Those of these pages that were not handed over yet."""
        queued = self._queued.get(columns.group, set())
        keep = [(block, page) for block, page in zip(columns.blocks, columns.pages, strict=True) if block not in queued]
        return WindowPages(columns.group, tuple(block for block, _ in keep), tuple(page for _, page in keep))

    def saved(self, group: int, block: int) -> bool:
        """Whether this page was handed over."""
        return block in self._queued.get(group, ())

    def queued(self, groups: Iterable[GroupPages]) -> None:
        """These were handed over."""
        for columns in groups:
            self._queued.setdefault(columns.group, set()).update(columns.blocks)

    def lost(self, groups: Iterable[GroupPages], blocks: Iterable[int]) -> None:
        """These did not reach the pool: `finish` lists those that it still holds."""
        gone = set(blocks)
        for columns in groups:
            self._queued[columns.group] -= gone.intersection(columns.blocks)
