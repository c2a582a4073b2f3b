"""Whose pages are given back when a sequence has to grow and no page is left: a decision from numbers alone.

    if not sequence.grow(upto):
        victim = youngest_behind(own_number, running)        # None: wait, until pages come free
        ... take the victim out of the batch, `await request.preempted()`, `sequence.release()`, admit it again later ...

Why nobody waits for ever: number requests as they arrive, and keep the number. The one with the smallest gives way to nobody,
and everybody else's pages come to it in time: those of running ones by preemption, those of a prompt that loads or is computed
when that is done, since the rest of it is booked (`PagedCache.admit(booked_tokens=)`). So it finishes; then the next one does.
What holds pages beside them, saves that go on and pages in quarantine, ends by itself.
"""

from collections.abc import Iterable


def youngest_behind(number: int, running: Iterable[int]) -> int | None:
    """The largest of the numbers in `running` that is larger than `number`; None if there is none: then `number` waits.

    `running` are those whose pages can be had at once: requests in the batch, none that is looked up or loaded at this moment.
    They get into the batch without any further page, so to wait for them is safe, and to throw away what they load is not
    needed.
    """
    return max((other for other in running if other > number), default=None)
