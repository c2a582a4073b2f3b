"""The large model as the engine's computer: chunks of prompts one by one, what decodes together."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from akv.errors import SettingsError
from akv_testing.engine.config import EngineConfig
from akv_testing.engine.large.attention import attend_chunk
from akv_testing.engine.large.decoding import Shape, Slice
from akv_testing.engine.large.model import LargeModel
from akv_testing.engine.large.places import PromptPlace, upload
from akv_testing.engine.pages import Pages
from akv_testing.engine.step import Chunk, Sampled

#: Tokens of all contexts that are decoded in one product: 1 GiB each of keys and of values of one layer at 8 heads of 128.
_MOST_COLUMNS = 1 << 19


def open_pages(config: EngineConfig) -> Pages:
    """Pages for a `LargeComputer`: with one to spare, which rows of a batch that are nobody's write to."""
    if config.contiguous_pages:
        raise SettingsError("contiguous_pages", True, "the large model's layers lie apart, as in servers", "leave it out")
    return Pages(config, spare_pages=1)


class LargeComputer:
    """What `open_engine(computer=)` takes. Several may share a model, each with pages of its own."""

    def __init__(self, config: EngineConfig, model: LargeModel, pages: Pages) -> None:
        """`pages`: of `open_pages()`."""
        self._model, self._pages = model, pages
        #: What CUDA's kernels run on, for `open_connector(stream=)`. Not the default one: no graph is captured there.
        self.stream: torch.cuda.Stream | None = None
        if model.device.type == "cuda":
            self.stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        self._groups, self._size = config.groups, config.tokens_per_block
        self._slices: dict[Shape, Slice] = {}
        self._memory = None if self.stream is None else torch.cuda.graph_pool_handle()

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        """As `Computer` says. Waits for the device where a token is sampled."""
        for chunk in chunks:
            if chunk.lora is not None or chunk.drafts:
                raise ValueError("the large model has neither adapters nor a drafter")
        with torch.inference_mode(), self._entered():
            for chunk in chunks:
                self._pages.copy(chunk.copies)
            answers: list[Sampled | None] = [None] * len(chunks)
            for some in _together([at for at, chunk in enumerate(chunks) if len(chunk.tokens) == 1], chunks):
                for at, answer in zip(some, self._decode([chunks[at] for at in some]), strict=True):
                    answers[at] = answer
            prompts = {at: self._prompt(chunk) for at, chunk in enumerate(chunks) if len(chunk.tokens) > 1}
            for at, logits in prompts.items():
                answers[at] = _answer(chunks[at], int(logits.argmax()), logits) if chunks[at].following is None else None
            return answers

    def attend(self, layer: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What one layer's attention of a chunk comes to, pages written and read: for who measures that alone."""
        with torch.inference_mode(), self._entered():
            places = self._places(chunk)
            return self._attend(layer, places[self._pages.group_of(layer)], q, k, v)

    def _decode(self, chunks: Sequence[Chunk]) -> list[Sampled | None]:
        shape = Shape.of(chunks)
        if shape not in self._slices:
            self._slices[shape] = Slice(self._model, self._pages, self._groups, shape, self._size)
        batch = self._slices[shape]
        batch.fill(chunks)
        tokens, logits = batch.run(self.stream, self._memory)
        return [_answer(chunk, tokens[row], logits[row]) for row, chunk in enumerate(chunks)]

    def _prompt(self, chunk: Chunk) -> Tensor:
        """The logits behind its last token. On CUDA they are queued."""
        model, start = self._model, chunk.start
        places = self._places(chunk)
        angles = model.angles(torch.arange(start, start + len(chunk.tokens), device=model.device))
        hidden = model.embed(upload(chunk.tokens, model.device))
        for number, layer in enumerate(model.layers):
            q, k, v = layer.query_key_value(hidden, angles)
            attended = self._attend(number, places[self._pages.group_of(number)], q, k, v)
            hidden = layer.after_attention(hidden, attended)
        return model.logits(hidden[-1:])[0]

    def _attend(self, layer: int, place: PromptPlace, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._pages.layer(layer)
        place.write(keys, k)
        place.write(values, v)
        window = self._groups[self._pages.group_of(layer)].window_tokens
        return attend_chunk(q, place.read(keys, 1)[:, : place.length], place.read(values, 1)[:, : place.length], window)

    def _places(self, chunk: Chunk) -> list[PromptPlace]:
        end = chunk.start + len(chunk.tokens)
        return [
            PromptPlace(group, table, chunk.start, end, self._size, self._model.device)
            for group, table in zip(self._groups, chunk.tables, strict=True)
        ]

    def _entered(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _answer(chunk: Chunk, token: int, logits: Tensor) -> Sampled | None:
    if chunk.following is not None:
        return None
    kept = logits.float().unsqueeze(0).cpu() if chunk.keep_logits else None
    return Sampled((token,), kept, rejected=0, guess=None)


def _together(places: Sequence[int], chunks: Sequence[Chunk]) -> list[list[int]]:
    """Cut what decodes into batches that are computed at a time, alike contexts together."""
    batches: list[list[int]] = []
    for at in sorted(places, key=lambda at: chunks[at].start):
        grown = [*(batches[-1] if batches else []), at]
        shape = Shape.of([chunks[one] for one in grown])
        if batches and shape.sequences * shape.context_tokens <= _MOST_COLUMNS:
            batches[-1] = grown
        else:
            batches.append([at])
    return batches
