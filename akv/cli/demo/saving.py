"""Process A: answers the conversations, turn by turn, and saves what it computed."""

from collections.abc import Callable

from akv import open_connector
from akv.cli.demo.conversations import questions
from akv.cli.demo.jobs import Job, Progress, Turn
from akv.cli.demo.setting import ANSWER_TOKENS, engine_config, settings
from akv_testing.engine import Engine, Pages, open_engine
from akv_testing.engine.text import conversation


async def save(job: Job, progress: Progress) -> tuple[tuple[Turn, ...], ...]:
    """Answer everything; every save has ended when it returns."""
    config = engine_config()
    pages = Pages(config)
    async with (
        open_connector(settings(job.master_address), pages.layout, pages.caches) as kv,
        open_engine(config, pages=pages, kv=kv) as engine,
    ):
        return await answer_all(engine, job, lambda done, of: progress("compute and save", done, of))


async def answer_all(engine: Engine, job: Job, progress: Callable[[int, int], None]) -> tuple[tuple[Turn, ...], ...]:
    """Conversation by conversation, turn by turn, each prompt with the answers before it; one request at a time."""
    answered = []
    for number in range(job.conversations):
        told: list[tuple[str, tuple[int, ...]]] = []
        turns: list[Turn] = []
        for question in questions(number, job.turns):
            prompt = tuple(conversation(told, question))
            request_id = f"c{number}t{len(turns)}"
            result = await engine.generate(request_id, prompt, max_new_tokens=ANSWER_TOKENS, reads_pool=False)
            # The next turn resumes behind what this one computed, and so would the pool's readers.
            await engine.settled()
            told.append((question, result.tokens))
            turns.append(Turn(prompt, result.tokens))
            progress(number * job.turns + len(turns), job.conversations * job.turns)
        answered.append(tuple(turns))
    return tuple(answered)
