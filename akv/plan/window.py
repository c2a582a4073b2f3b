"""Which blocks a sliding window still reads, which it has left behind, and what is stored for an end (W1 to W3, W8, S12).

All of it is for one layer group. Tokens and blocks are counted from the sequence's start. In every signature `window_tokens`
is W, and 0 for full attention, of which nothing is ever stale; `sink_tokens` is S, `tokens_per_block` is T. A list of ranges
of blocks is ascending, its ranges apart and none empty: at most two (the sinks, and the tail), one where these meet.
"""


def sink_blocks(sink_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold sink tokens (W1): ceil(S/T). The last of them may hold other tokens too, and is kept whole."""
    return -(-sink_tokens // tokens_per_block)


def stale_blocks(history: int, window_tokens: int, sink_tokens: int, tokens_per_block: int) -> range:
    """The blocks that nobody reads any more once H = `history` tokens have KV (W1): [start, stale_end).

    start = min(ceil(H/T), ceil(S/T)); stale_end = max(start, floor((H + 1 - W)/T)). Nothing is stale in full attention, and
    the answer is then empty: range(start, start).
    """
    start = min(-(-history // tokens_per_block), sink_blocks(sink_tokens, tokens_per_block))
    if not window_tokens:
        return range(start, start)
    # The + 1 is right. With H tokens done the next one sits at position H, and it is in its own window: the W tokens that end
    # with it are [H + 1 - W, H]. So H + 1 - W is the first position that anybody still reads, and a block that ends before it
    # is stale. floor((H - W)/T) would count the window from the last token that is done: at one length in T a block would be
    # kept, saved and asked for that nobody reads, and a lookup would miss though all that is read is there. More than + 1
    # frees a page that the next token reads.
    return range(start, max(start, (history + 1 - window_tokens) // tokens_per_block))


def kept_blocks(history: int, window_tokens: int, sink_tokens: int, tokens_per_block: int) -> list[range]:
    """The blocks that `history` tokens have begun and that are not stale (W1): [0, start) and [stale_end, ceil(H/T))."""
    stale = stale_blocks(history, window_tokens, sink_tokens, tokens_per_block)
    return _joined(range(stale.start), range(stale.stop, -(-history // tokens_per_block)))


def needed_blocks(end_block: int, window_tokens: int, sink_tokens: int, tokens_per_block: int) -> list[range]:
    """What must be there for a request to resume at q = `end_block` blocks (W2): [0, start(qT)) and [stale_end(qT), q).

    That is what is kept at qT tokens, no block being begun there. Full attention needs [0, q).
    """
    return kept_blocks(end_block * tokens_per_block, window_tokens, sink_tokens, tokens_per_block)


def load_blocks(local_blocks: int, end_block: int, window_tokens: int, sink_tokens: int, tokens_per_block: int) -> list[range]:
    """What a request that resumes at q = `end_block` blocks lacks beyond a local match of m = `local_blocks` (W8).

    `needed_blocks` from m on: the window's [max(m, stale_end(qT)), q), sinks from m on; in full attention [m, q).
    """
    return _cut(needed_blocks(end_block, window_tokens, sink_tokens, tokens_per_block), local_blocks, end_block)


def closing_window(
    prompt_tokens: int,
    chain_length: int,
    computed_before: int,
    window_tokens: int,
    sink_tokens: int,
    tokens_per_block: int,
    *,
    rewind_tokens: int,
    retention_tokens: int,
    resumed_at: int | None,
) -> list[range]:
    """What the closing pass of a sequence saves of a window group (W3): [0, start(pT)) and [stale_end(max(0, pT - R')), p).

    `prompt_tokens` is n and `chain_length` p, in blocks. R' is the rewind R, and T at least if floor((n - 1)/T) < p: one token
    has to be left to compute, so the same prompt asked for again resumes at p - 1 at most.

    Of these only the pages that the request still holds when they are copied: not stale at max(0, H0 - retention), where H0 is
    `computed_before`, the tokens done before this pass, since the engine last released pages there; and not stale at qT if
    the incarnation resumed at q = `resumed_at` blocks (local match and honoured load), since it never had those. None or 0: it
    began at the start. `rewind_tokens` and `retention_tokens` are in tokens, 0 for none.

    Pages that the engine releases when it commits this very pass are in the answer on purpose: the copy comes before that.
    """
    return _ending(
        chain_length,
        rewind_tokens if (prompt_tokens - 1) // tokens_per_block >= chain_length else max(rewind_tokens, tokens_per_block),
        (max(0, computed_before - retention_tokens), (resumed_at or 0) * tokens_per_block),
        (window_tokens, sink_tokens, tokens_per_block),
    )


def finishing_window(
    computed: int,
    window_tokens: int,
    sink_tokens: int,
    tokens_per_block: int,
    *,
    rewind_tokens: int,
    retention_tokens: int,
    resumed_at: int | None,
) -> list[range]:
    """What a request that finishes with `computed` tokens of KV saves of a window group (S12).

    As its closing pass would, with n = `computed` and p = floor(n/T), but finishing is no pass: the last one is committed, so
    the request holds what is not stale at max(0, `computed` - retention). A retention of T holds all that the end p needs.
    """
    return closing_window(
        computed,
        computed // tokens_per_block,
        computed,
        window_tokens,
        sink_tokens,
        tokens_per_block,
        rewind_tokens=rewind_tokens,
        retention_tokens=retention_tokens,
        resumed_at=resumed_at,
    )


def _ending(end: int, reach_tokens: int, released: tuple[int, ...], shape: tuple[int, int, int]) -> list[range]:
    """What is needed at the ends from `reach_tokens` before `end` up to it, less what was stale at one of these histories.

    `end` is in blocks, `released` in tokens, `shape` is (W, S, T).
    """
    sinks = stale_blocks(end * shape[2], *shape).start
    tail = stale_blocks(max(0, end * shape[2] - reach_tokens), *shape).stop
    wanted = _joined(range(sinks), range(tail, end))
    for history in released:
        gone = stale_blocks(history, *shape)
        wanted = _joined(*_cut(wanted, 0, gone.start), *_cut(wanted, gone.stop, end))
    return wanted


def _cut(blocks: list[range], first: int, end: int) -> list[range]:
    """The part of these ranges in [first, end)."""
    cut = (range(max(first, some.start), min(end, some.stop)) for some in blocks)
    return [some for some in cut if some]


def _joined(*blocks: range) -> list[range]:
    """These ranges without the empty ones, those that meet or overlap as one: no block is counted twice.

    None may begin or end before the one that it follows.
    """
    joined: list[range] = []
    for some in filter(None, blocks):
        if joined and some.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, some.stop)
        else:
            joined.append(some)
    return joined
