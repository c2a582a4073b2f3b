"""Names for the plain integers that must not be mixed up.

They are `NewType`s: free at run time, checked by mypy. Where a number has a unit and no type here, its name says the unit
(`deadline_s`, `segment_bytes`).
"""

from typing import NewType

#: Position of a block in its sequence, from 0: block b covers tokens [b * T, (b + 1) * T).
BlockOrdinal = NewType("BlockOrdinal", int)
#: Index of a page in the engine's cache of one layer group, from 0.
PageIndex = NewType("PageIndex", int)
#: Index of a layer group in its layout, from 0.
LayerGroupId = NewType("LayerGroupId", int)
#: A number of tokens.
TokenCount = NewType("TokenCount", int)
#: A number of bytes.
ByteCount = NewType("ByteCount", int)

#: What an engine writes in a page table where a block has no page.
NO_PAGE = PageIndex(-1)
