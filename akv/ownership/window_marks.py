"""Which window pages of one request were handed over for saving, or are in the pool (S2, S12, S13).

A window page is offered in its own pass alone: the engine reuses it right after, so there is no mark that could step back.
What is kept here is only what `finish` must not list again, and what it may still list.
"""

from collections.abc import Collection, Iterable

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
        #: Handed over, and not ended.
        self._queued: dict[int, set[int]] = {}
        #: In the pool, as far as this incarnation knows: saved by it, or not listed since it was known to be there.
        self._there: dict[int, set[int]] = {}

    def ran(self, before: int, held: tuple[WindowPages, ...], *, closes: bool) -> None:
        """A pass ran behind `before` tokens."""
        if self.began_at is None:
            self.began_at = before
        self.held = held
        self.closed = self.closed or closes

    def begin_incarnation(self) -> None:
        """The pages were taken away. The prompt's end is listed again by the pass that completes it again, as far as the pool
        is not known to hold it by then.
        """
        self.closed, self.began_at, self.held = False, None, ()
        # What was under way is withdrawn. What reaches the pool all the same is put a second time at worst, and the first
        # value stays.
        self._queued.clear()
        self._there.clear()

    def new_generation(self) -> None:
        """The pool may have lost what it had: `finish` lists what it still holds."""
        self._there.clear()

    def open(self, columns: WindowPages) -> WindowPages:
        """Those of these pages that were not handed over yet, and are not there."""
        pages = zip(columns.blocks, columns.pages, strict=True)
        keep = [(block, page) for block, page in pages if not self.saved(columns.group, block)]
        return WindowPages(columns.group, tuple(block for block, _ in keep), tuple(page for _, page in keep))

    def saved(self, group: int, block: int) -> bool:
        """Whether this page was handed over, or is there."""
        return block in self._queued.get(group, ()) or block in self._there.get(group, ())

    def queued(self, groups: Iterable[GroupPages]) -> None:
        """These were handed over."""
        for columns in groups:
            self._queued.setdefault(columns.group, set()).update(columns.blocks)

    def there(self, group: int, blocks: Iterable[int]) -> None:
        """The pool holds these pages of a group."""
        self._there.setdefault(group, set()).update(blocks)

    def ended(self, columns: GroupPages, stored: Collection[int]) -> None:
        """The saving of these pages ended. Those of the `stored` blocks are there; of the others `finish` lists what it still
        holds.
        """
        self._queued[columns.group].difference_update(columns.blocks)
        there = self._there.setdefault(columns.group, set())
        there.difference_update(columns.blocks)
        there.update(block for block in columns.blocks if block in stored)
