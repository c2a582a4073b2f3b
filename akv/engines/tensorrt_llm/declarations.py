"""What the classes declare to the runtime, which reads it from the class before there is an instance."""

import msgspec

from akv.host import declared_reuse
from akv.values.settings import Settings


def scheduler_declarations(settings: Settings, *, reserves: bool) -> dict[str, bool]:
    """The scheduler class's attributes. The runtime counts as declared what is exactly True."""
    reads = settings.role != "producer"
    return {
        # Each owner opens a connector of its own, and names its pages as a server of one rank does (K3).
        "supports_attention_dp": True,
        # Drafters are told apart at start, and those that cannot be keyed are refused by name (P1).
        "supports_speculative_prefill": True,
        # The runtime does not take both, so it is one pair of classes or the other.
        "reports_failed_loads": not reserves,
        # requires_block_aligned_reuse, drops_reuse_match_backoff (P2).
        **msgspec.structs.asdict(declared_reuse(settings.local_reuse_backoff, reads=reads)),
        # A parked load ends within its deadline whatever the engine does, so nothing here waits for pages (D7).
        "requires_completion_reservation": False,
        # An offer holds nothing until it is taken up, so the runtime may ask before the batch is final (H3).
        "supports_admission_query": reads,
    }


def worker_declarations(*, reserves: bool) -> dict[str, bool]:
    """The worker class's attributes."""
    return {"supports_attention_dp": True, "reports_failed_loads": not reserves}
