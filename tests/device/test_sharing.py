"""Work that two threads share: each part once, and nothing runs any more when it returns, well or not."""

import threading

import pytest

from akv.device.sharing import shared


def test_R6_each_part_is_done_once_and_by_both_threads() -> None:
    done: list[tuple[int, int]] = []
    both = threading.Barrier(2, timeout=10)

    def work(part: int) -> None:
        if part < 2:
            both.wait()  # Would break if one thread took both.
        done.append((part, threading.get_ident()))

    shared(work, range(1000))
    assert sorted(part for part, _ in done) == list(range(1000))
    assert len({thread for _, thread in done}) == 2


@pytest.mark.parametrize("helper_fails", [False, True])
def test_R6_a_failure_is_raised_when_nothing_runs_any_more_and_what_nobody_began_is_left_out(helper_fails: bool) -> None:
    here = threading.get_ident()
    both = threading.Barrier(2, timeout=10)
    failed = threading.Event()
    running: set[int] = set()
    done: list[int] = []

    def work(part: int) -> None:
        running.add(threading.get_ident())
        if part < 2:
            both.wait()
            if (threading.get_ident() != here) is helper_fails:
                failed.set()
                running.discard(threading.get_ident())
                raise ValueError("a part")
            assert failed.wait(10)
            # Long enough for whoever does not wait for this thread to be seen.
            threading.Event().wait(0.05)
        done.append(part)
        running.discard(threading.get_ident())

    with pytest.raises(ValueError, match="a part"):
        shared(work, range(1000))
    assert not running
    assert len(done) < 1000 - 1
