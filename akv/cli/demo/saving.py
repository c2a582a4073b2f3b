"""Process A: answers the conversations, turn by turn, and saves what it computed."""

from collections.abc import Callable

from akv import open_connector
from akv.cli.demo.conversations import ending_at, questions
from akv.cli.demo.jobs import Job, Progress, Turn
from akv.cli.demo.setting import ANSWER_TOKENS, TOKENS_PER_BLOCK, engine_config, settings
from akv_testing.engine import Engine, Pages, capabilities_of, open_engine
from akv_testing.engine.text import conversation


async def save(job: Job, progress: Progress) -> tuple[tuple[Turn, ...], ...]:
    """Answer everything; every save has ended when it returns."""
    config = engine_config(job.layout, job.device)
    pages = Pages(config)
    its_settings = settings(job.master_address, config.model.key)
    async with (
        open_connector(its_settings, pages.layout, pages.caches, capabilities=capabilities_of(config)) as kv,
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
            done = number * job.turns + len(turns)
            cut = ending_at(told, question, done % TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
            prompt = tuple(conversation(told, cut))
            request_id = f"c{number}t{len(turns)}"
            result = await engine.generate(request_id, prompt, max_new_tokens=ANSWER_TOKENS, reads_pool=False)
            # The next turn resumes behind what this one computed, and so would the pool's readers.
            await engine.settled()
            told.append((cut, result.tokens))
            turns.append(Turn(prompt, result.tokens, result.local_tokens))
            progress(done + 1, job.conversations * job.turns)
        answered.append(tuple(turns))
    return tuple(answered)
