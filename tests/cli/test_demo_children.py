"""What the demo says when one of its processes fails."""

import anyio
import pytest

from akv.cli.demo.children import ChildFailed, open_child
from akv.cli.demo.jobs import Job
from akv.cli.demo.process import Part
from akv_testing.pytest_backends import real_backends

anyio_backend = real_backends


def ignore(step: str, done: int, of: int) -> None:
    """Progress that nobody watches."""


@pytest.mark.mooncake
@pytest.mark.anyio
async def test_a_child_that_fails_is_an_error_that_quotes_its_log() -> None:
    nobody = Job(backend="asyncio", master_address="127.0.0.1:1", segment_bytes=1024**2)
    async with open_child(Part.LEND) as lender:
        await lender.tell(nobody)
        with pytest.raises(ChildFailed, match=r"(?s)process 'lend' ended with status 1; .*PoolError: .*127\.0\.0\.1:1"):
            await lender.answer(ignore, lambda line: line.ready or None)


@pytest.mark.anyio
async def test_a_child_that_ended_before_its_job_is_told_apart_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    async with open_child(Part.SAVE) as child:
        # More than a pipe holds: it breaks while it is written, whenever the child ended.
        await child.tell(Job(backend="x" * 1024**2, master_address="", segment_bytes=0))
        with pytest.raises(ChildFailed, match="process 'save' ended with status 1"):
            await child.answer(ignore, lambda line: line.ready or None)


@pytest.mark.anyio
async def test_a_child_is_gone_when_its_block_fails() -> None:
    with anyio.fail_after(60), pytest.raises(ValueError, match="of the block"):
        async with open_child(Part.LEND) as lender:
            raise ValueError("of the block")
    assert lender._process.returncode is not None
