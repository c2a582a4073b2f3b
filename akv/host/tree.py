"""The radix tree of computed blocks: which prefixes can be reused, and which are given up first.

A digit of this radix tree is a whole block, compared by its tokens and not by a hash, so a match is certain. Every block is a
node of its own. Merging chains of single children into one edge was rejected: a block is the unit that is matched, held and
evicted, so edges would be split and joined all the time to save memory that is small next to the pages.

Invariant that makes eviction cheap: whoever holds a block also holds every block before it. So an unheld ("idle") block has
only idle blocks behind it, every idle block can be evicted, and counting them is counting what eviction can give.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import count

import msgspec

from akv.host.pages import Block, Node, Root
from akv.values.scope import Scope


class BlockTree:
    """Computed blocks by scope and tokens. Knows nothing of free pages: evicted blocks are handed to the caller."""

    def __init__(self) -> None:
        self._roots: dict[Scope, Root] = {}
        #: Idle leaves by the tick of their last use, then by a serial number, because blocks have no order of their own.
        #: Entries that no longer hold are skipped when they come up.
        self._leaves: list[tuple[int, int, Block]] = []
        self._serial = count()
        self._tick = 0
        #: Blocks in the tree.
        self.blocks = 0
        #: Blocks in the tree that nobody holds: exactly those that eviction can give.
        self.idle = 0
        #: Blocks past which it is worth looking for bare ones.
        self._prune_past = 64

    def match(self, scope: Scope, keys: Sequence[bytes]) -> list[Block]:
        """The longest chain of cached blocks that these blocks of tokens begin with, whatever their windows. Takes no hold."""
        found: list[Block] = []
        node: Node | None = self._roots.get(_identity(scope))
        for key in keys:
            if node is None or (child := node.children.get(key)) is None or child.barred:
                break
            found.append(child)
            node = child
        return found

    def insert(self, scope: Scope, before: Block | None, key: bytes, block: Block) -> Block:
        """Put a held block behind `before` (None: first of its scope). Returns the block that stands there.

        That is another block if equal tokens were computed twice at the same time: the first stays, because others may
        hold it already. The caller holds `before`.
        """
        parent: Node = before if before is not None else self._root(_identity(scope))
        resident = parent.children.get(key)
        if resident is not None:
            return resident
        parent.children[key] = block
        block.parent, block.key = parent, key
        self.blocks += 1
        return block

    def woken(self, block: Block) -> None:
        """An idle block found its first holder again."""
        self.idle -= 1

    def rested(self, block: Block) -> None:
        """A cached block lost its last holder: it stays, until its pages are needed."""
        self._tick += 1
        block.idle_since = self._tick
        self.idle += 1
        if not block.children:
            self._offer(block)

    def evict(self, blocks: int) -> list[Block]:
        """Take so many idle blocks out, the least recently used leaf first. The caller has looked at `idle` first."""
        evicted: list[Block] = []
        while len(evicted) < blocks:
            since, _, block = heapq.heappop(self._leaves)
            if _is_offer(since, block):
                self._remove(block)
                evicted.append(block)
        return evicted

    def prune(self) -> None:
        """Drop idle ends without any page. There are none but in caches without full attention, where nothing evicts them."""
        if self.blocks <= self._prune_past:
            return
        for block in reversed(list(self)):
            if not (block.holders or block.children or block.pages or any(block.windows)):
                self._remove(block)
        self._prune_past = 2 * self.blocks + 64

    def __iter__(self) -> Iterator[Block]:
        """Every block, each after the block before it."""
        todo: list[Node] = list(self._roots.values())
        while todo:
            children = todo.pop().children.values()
            yield from children
            todo.extend(children)

    def _root(self, scope: Scope) -> Root:
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Root(scope)
        return root

    def _remove(self, block: Block) -> None:
        parent = block.parent
        if parent is None:
            return
        del parent.children[block.key]
        block.parent, block.key = None, b""
        self.blocks -= 1
        self.idle -= 1
        if isinstance(parent, Block):
            if not parent.children and not parent.holders:
                self._offer(parent)
        elif not parent.children:
            # Scopes come and go with tenants; an empty root would stay for ever.
            del self._roots[parent.scope]

    def _offer(self, block: Block) -> None:
        # Every return to rest adds an entry and only eviction takes entries away: without this a server that never runs
        # short of pages would grow the heap for ever.
        if len(self._leaves) > 2 * self.blocks + 64:
            self._leaves = [(since, tie, leaf) for since, tie, leaf in self._leaves if _is_offer(since, leaf)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.idle_since, next(self._serial), block))


def _is_offer(since: int, block: Block) -> bool:
    return block.cached and not block.holders and not block.children and block.idle_since == since


def _identity(scope: Scope) -> Scope:
    """None and "" are the same scope (K5)."""
    return scope if scope.salt != "" else msgspec.structs.replace(scope, salt=None)
