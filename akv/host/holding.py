"""Who holds which block, and what becomes of a block that nobody holds: the one place where pages change hands."""

from collections import Counter
from collections.abc import Iterable, Sequence

from akv.host.pages import Block, FreePages
from akv.host.tree import BlockTree


class Holdings:
    """Every page is in one of three places: free, in a block that rests in the tree, or in a block that somebody holds."""

    def __init__(self, page_counts: Sequence[int]) -> None:
        self.free = FreePages(page_counts)
        self.tree = BlockTree()
        self._page_counts = tuple(page_counts)
        #: The blocks of each live holder. Only `check()` needs them: the counts in the blocks are what decides.
        self._held: dict[int, list[Block]] = {}
        self._next = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now: free, or idle in the tree."""
        return self.free.blocks + self.tree.idle

    def register(self, blocks: list[Block]) -> int:
        """Note that somebody holds these blocks (each once, each after the one it follows); returns the holder."""
        self._next += 1
        self._held[self._next] = blocks
        return self._next

    def is_live(self, holder: int) -> bool:
        """Whether that holder has not let go."""
        return holder in self._held

    def release(self, holder: int) -> None:
        """End a holder: let go of all its blocks. Idempotent."""
        self.let_go(self._held.pop(holder, []))

    def take(self, blocks: int) -> list[Block] | None:
        """New blocks, held once, from free pages, then from evicted ones; None, and nothing changed, if there are too few."""
        # Looked at before anything is evicted: an admission that fails must not have emptied the cache.
        missing = blocks - self.free.blocks
        if missing > self.tree.idle:
            return None
        if missing > 0:
            self.evict(missing)
        taken = self.free.take(blocks)
        for block in taken:
            block.holders = 1
        return taken

    def evict(self, blocks: int) -> None:
        """Free the pages of so many idle blocks; the caller has looked that there are as many."""
        for block in self.tree.evict(blocks):
            self.free.give(block)

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            if block.cached and not block.holders:
                self.tree.woken(block)
            block.holders += 1

    def let_go(self, blocks: Sequence[Block]) -> None:
        """Take a holder from each block: a computed one rests in the tree, any other is free."""
        for block in blocks:
            block.holders -= 1
            if block.holders:
                continue
            if block.cached:
                self.tree.rested(block)
            else:
                self.free.give(block)

    def check(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well."""
        wrong: list[str] = []
        held = Counter(id(block) for blocks in self._held.values() for block in blocks)
        cached = list(self.tree)
        known = {id(block): block for blocks in [*self._held.values(), cached] for block in blocks}
        for block in known.values():
            if block.holders != held[id(block)]:
                wrong.append(f"block {block.pages} counts {block.holders} holders and has {held[id(block)]}")
            if isinstance(block.parent, Block) and block.holders and not block.parent.holders:
                wrong.append(f"block {block.pages} is held and the block before it is not")
        if len(cached) != self.tree.blocks:
            wrong.append(f"the tree counts {self.tree.blocks} blocks and has {len(cached)}")
        idle = sum(not block.holders for block in cached)
        if idle != self.tree.idle:
            wrong.append(f"the tree counts {self.tree.idle} idle blocks and has {idle}")
        for group, free in enumerate(self.free.pages()):
            used = Counter(free)
            used.update(block.pages[group] for block in known.values())
            twice = sorted(page for page, owners in used.items() if owners > 1)
            lost = sorted(set(range(self._page_counts[group])) - set(used))
            if twice or lost:
                wrong.append(f"group {group}: pages with two owners {twice}, pages lost {lost}")
        return wrong
