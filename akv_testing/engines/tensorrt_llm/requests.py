"""The stand-in's requests."""

from dataclasses import dataclass, field
from enum import Enum


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    #: Outside the batch while its pages load.
    PARKED = "parked"
    CONTEXT = "context"
    GENERATION = "generation"
    #: Ended, and its pages are held until the connector says that they are saved.
    SAVING = "saving"
    DONE = "done"


@dataclass(eq=False)
class StandInRequest:
    """A request, with the attributes that TensorRT-LLM's has."""

    request_id: int
    prompt: list[int]
    #: How many tokens it generates; at least one.
    max_new_tokens: int = 1
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_positions: list[int] | None = None
    multimodal_lengths: list[int] | None = None
    py_return_context_logits: bool = False
    is_dummy_request: bool = False
    is_generation_only_request: bool = False
    #: What the runtime took up of the connector's answer.
    py_num_connector_matched_tokens: int = 0

    #: Blocks that the engine's own cache has for it: a test's choice.
    local_blocks: int = 0
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    #: Tokens that have KV.
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    #: What its pages have to hold, by group and block: of those that it wrote itself what it wrote, which beside a drafter
    #: depends on the tokens that were there by then.
    right: dict[tuple[int, int], bytes] = field(default_factory=dict)
    #: Whether it has pages for its first chunk, and the connector was told so.
    allocated: bool = False
    #: Tokens and pages that the connector was told; None before its first pass.
    told: tuple[int, list[int]] | None = None
    #: Whether the connector was asked for this allocation, and the answer that was not taken up yet.
    was_asked: bool = False
    offered: int = 0
    cancelled: bool = False

    def get_tokens(self, beam: int) -> list[int]:
        """The prompt and what was generated."""
        if beam:
            raise IndexError(f"beam {beam} of one")
        return self.prompt + self.generated

    @property
    def length(self) -> int:
        """Tokens by now."""
        return len(self.prompt) + len(self.generated)

    @property
    def identity(self) -> bytes:
        """What of it, besides tokens and media, its pages depend on. A salt changes no KV, but pages of another salt are as
        wrong: whoever is answered from them is told what was asked under it.
        """
        return repr((self.cache_salt or "", self.lora_task_id)).encode()

    @property
    def seen_tokens(self) -> list[int]:
        """The tokens as the model sees them: for a picture's placeholders its content."""
        tokens = self.get_tokens(0)
        positions, lengths = self.multimodal_positions or (), self.multimodal_lengths or ()
        # A picture that nobody has digested is like no other.
        pictures = self.multimodal_hashes or [[self.request_id, -1]] * len(positions)
        for picture, position, length in zip(pictures, positions, lengths, strict=True):
            tokens[position : position + length] = [hash((*picture, offset)) for offset in range(length)]
        return tokens

    def forget_allocation(self) -> None:
        """Its pages have gone: it will be computed from the start."""
        self.state = State.WAITING
        self.computed, self.pages, self.told, self.right = 0, [], None, {}
        self.allocated, self.was_asked, self.offered, self.py_num_connector_matched_tokens = False, False, 0, 0
