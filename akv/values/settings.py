"""What a deployment decides: one tree of frozen structs.

Constructing one checks nothing: `akv.settings_checks.check_settings()` does. The comments are the reference: `docs/reference`,
`akv config explain` and `akv config schema` show them.
"""

from typing import Annotated, Literal

import msgspec

from akv.values.hidden import HidesSecrets

_MIB = 1024**2
_GIB = 1024**3
#: The store counts in signed 64-bit integers.
_LARGEST = 2**63 - 1

#: Bytes. The store mounts nothing smaller.
SMALLEST_SEGMENT_BYTES = 16 * _MIB

#: Seconds. Event loops wake no finer; uvloop returns at once from shorter sleeps, so a poll loop would spin.
SHORTEST_TICK_S = 0.001

#: Tokens. R unless it is set, and what akv.host keeps behind windows for it unless it is told (W4).
DEFAULT_REWIND_TOKENS = 1024

Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Size = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
#: The store's client reads these with C's `int`.
ClientCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this process joins the pool."""

    #: "host:port" of the pool's master. Required with pool "mooncake"; stays empty with "embedded", which starts its own.
    master_address: str = ""
    #: The name or address under which other processes of the pool reach this one. Loopback serves one machine only.
    local_hostname: Name = "127.0.0.1"
    #: The transport between processes. "rdma" needs registered memory and a device; "tcp" needs neither.
    protocol: Literal["tcp", "rdma"] = "tcp"
    #: RDMA devices, comma separated; empty lets the store choose. Unused with "tcp".
    device_name: str = ""
    #: Where the store's clients find each other. The default asks peers directly and needs no further server.
    metadata_server: Name = "P2PHANDSHAKE"
    #: Bytes of memory that this process lends to the pool. 0 for none, else at least 16 MiB: the store mounts nothing smaller.
    segment_bytes: Size = _GIB
    #: What that memory is. "memfd": files without a name, which other processes of this user on this machine read in place,
    #: and which nobody can truncate. "file": files in `shared_memory_dir`, for readers that need a path. "private": what the
    #: store's client allocates, and reads alone. The first two are allocated whole, from the start. "auto" is "memfd" where
    #: there is room, and else "private", told by akv.segment.private.
    segment_memory: Literal["auto", "memfd", "file", "private"] = "auto"
    #: Bytes of one segment, at most. A process lends as many as `segment_bytes` takes. At least 32 MiB.
    segment_file_bytes: Annotated[int, msgspec.Meta(ge=2 * SMALLEST_SEGMENT_BYTES, le=_LARGEST)] = _GIB
    #: A directory in shared memory. In `akv-USERID` there, processes register the segments that they lend, and with "file"
    #: hold them. Processes with another one do not find each other's segments, and read them through the store's client.
    shared_memory_dir: Name = "/dev/shm"  # noqa: S108 - only a directory of our own is used there
    #: Bytes of the store client's own scratch memory. Pages never pass through it, so little is enough.
    local_buffer_bytes: Size = 16 * _MIB


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the store's client behaves in this whole process: it reads all but `capture_log` from environment variables.

    A variable that the operator set wins over the setting. Connectors of one process must agree on these (O8).
    """

    #: The least severe lines that the store's client writes to standard error (`MC_LOG_LEVEL`). At "INFO" it writes about 15
    #: for each setup.
    log_level: Literal["TRACE", "INFO", "WARNING", "ERROR"] = "ERROR"
    #: Attempts to join the pool (`MC_STORE_CLIENT_SETUP_RETRIES`). When the master refuses, the client's own 20 hold the
    #: interpreter lock for 90 seconds; one attempt takes 4.4.
    setup_retries: ClientCount = 1
    #: Milliseconds that the master may take for one answer (`MC_RPC_TIMEOUT_MS`). The client's own 30,000 outlast every
    #: deadline of akv.
    rpc_timeout_ms: ClientCount = 1500
    #: Seconds, whole, that a peer may take to say that a transfer arrived (`MC_TCP_STATUS_TIMEOUT_SEC`). With the client's own
    #: 30, a frozen peer holds a call for 30 to 62 seconds.
    tcp_status_timeout_s: ClientCount = 3
    #: Seconds, whole, that a transfer may stand still (`MC_TCP_PROGRESS_TIMEOUT_SEC`). The client's own are 30 here too, and
    #: both must be short for a call to end early.
    tcp_progress_timeout_s: ClientCount = 3
    #: Transfer entries that may wait for one peer, over all threads (`MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER`). Every buffer of
    #: a scatter list is one; past the limit calls fail and the peer stays wedged, so it is the largest that the client takes.
    tcp_max_queued_transfers_per_peer: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 65535
    #: Whether the store client's lines on standard error become events of akv, so that they are neither lost nor mixed into
    #: the server's own output.
    capture_log: bool = True


class Settings(HidesSecrets, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `open_connector()` takes: one model's cache and how it uses a pool. Frozen; unknown fields are refused by name."""

    SECRETS = frozenset({"key_secret", "integrity_secret"})

    #: Names the weights, and stands in every page's key: two models with one name would answer from each other's cache. Those
    #: of a drafter in the target's KV cache too: nothing else in a key tells two drafters of one shape apart. Required, and
    #: never guessed from a path.
    model_key: Name
    #: The first part of every key. Separates deployments that share a pool; it hides nothing from anybody.
    namespace: Name = "akv1"
    #: The weights' revision, part of every key. Empty if the model key says it all.
    revision: str = ""
    #: True leaves the layout's fingerprint out of the keys. Whoever sets it vouches that equal names have equal layouts.
    pin_model_key: bool = False
    #: How keys and hashes are spelt. "trtllm" spells them as TensorRT-LLM's servers do, to share a pool with them; it needs
    #: `pin_model_key`, and neither `key_secret`, `integrity` nor revisions of LoRA adapters can be used with it.
    key_format: Literal["akv", "trtllm"] = "akv"
    #: Keys every block's hash, so that whoever lists the pool's keys cannot confirm a guessed prompt. The same random text of
    #: at most 64 bytes in every server that shares pages; empty for none. It hides no page from anybody.
    key_secret: str = ""
    #: True: a request without a salt neither reads nor writes, so that no tenant's prompts are shared by oversight. Salts are
    #: random secrets of each tenant, and no names.
    require_salt: bool = False
    #: What is stored behind each page to recognise it by, 16 bytes. "checksum" finds pages that changed by accident; "mac",
    #: keyed by `integrity_secret`, also those that another client of the pool wrote. Such a page counts as missing. Servers
    #: with different choices share no page.
    integrity: Literal["off", "checksum", "mac"] = "off"
    #: Keys the codes of "mac": random text of at most 64 bytes, the same in every server that shares pages.
    integrity_secret: str = ""
    #: "producer" saves, "consumer" loads, "both" does both.
    role: Literal["both", "producer", "consumer"] = "both"
    #: "async": a request waits outside the batch while its pages load, and the others go on computing.
    load_mode: Literal["async"] = "async"
    #: "mooncake" joins a running pool; "embedded" starts a master of its own on loopback, which ends with this process.
    pool: Literal["mooncake", "embedded"] = "mooncake"
    #: How this process joins the pool.
    store: StoreSettings = StoreSettings()
    #: How the store's client behaves in this process.
    client: ClientSettings = ClientSettings()
    #: Bytes of host memory between store and device, for each direction. Shared evenly by the loaders, and by the savers; each
    #: share must hold a page.
    staging_buffer_bytes: Size = _GIB
    #: "auto" reads pages of memory that processes of this host lend to the pool straight from there, one copy and no store
    #: call, where that is possible. "staged" has the store's client fetch every page.
    read_path: Literal["auto", "staged"] = "auto"
    #: Loads that move pages at a time. Two, so that one scatters to the device while the other waits for the store.
    loaders: Count = 2
    #: With so many loads waiting or running, lookups offer nothing: computing is sooner than the end of such a queue. A
    #: threshold, asked at each lookup: offers that are out already may still be taken up.
    max_parked_loads: Count = 256
    #: Saves that move pages at a time.
    savers: Count = 1
    #: Keys in a lookup's first probe. Small, so that a prompt which nobody has cached costs one small call.
    probe_head: Count = 64
    #: Keys in each later probe. The client converts arguments under the interpreter lock, so larger calls stall the loop:
    #: beside lookups of 10,000 keys a sleeping task woke 2.2 ms late with 1,024 a call, 1.4 with 512 (99th percentile).
    probe_chunk: Count = 512
    #: Probe calls of one lookup in flight at a time. Two, so that the store works while the loop reads the answer before.
    probe_concurrency: Count = 2
    #: Tokens of recent requests whose block hashes are kept in memory, so that a conversation's next turn hashes only what is
    #: new. 0 keeps none.
    recent_chains_tokens: Tokens = 2_000_000
    #: Seconds after which a lookup answers a miss.
    lookup_deadline_s: Seconds = 1.0
    #: Milliseconds that a hook of a synchronous engine waits for a lookup, where the engine asks once and takes no "later" for
    #: an answer. Past it the request computes.
    lookup_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 20
    #: How matches of an engine's own cache are kept on blocks, so that offers can go on behind them (P2): "off" takes them
    #: whole, "align" keeps the engine's backoff beside a drafter and rounds down to a block. For engines that ask.
    local_reuse_backoff: Literal["off", "align"] = "off"
    #: Seconds from a load's dispatch after which it fails, and its request computes instead.
    load_deadline_s: Seconds = 5.0
    #: Seconds for which the pool's master protects a page that was asked for or read (its `--default_kv_lease_ttl`). The
    #: client cannot read that: with pool "mooncake" this must not be longer; pool "embedded" starts its master with it.
    #: Shorter is safe, and costs a second probe of loads that waited and the gets that took so long. Longer is not: what a get
    #: read after the lease may be another page's bytes. The default is half of what a master grants unless it is told.
    lease_s: Seconds = 5.0
    #: Loads of one request that may fail. After so many it is offered nothing more: one failure is an eviction, the next one a
    #: pool that does not deliver, and each may take `load_deadline_s`.
    max_load_attempts: Count = 2
    #: Seconds for which a page that the pool did not deliver counts as missing. The pool goes on naming what a dead process
    #: held for about 11 seconds; until then every request with that prompt would wait for a load that fails.
    negative_ttl_s: Seconds = 15.0
    #: Bytes of staging memory, of the snapshot ring and of pages that store calls may hold after they were given up, and peers
    #: after transfers that failed. Past it the pool counts as unavailable, and is not asked until such calls have returned;
    #: what peers may touch (RDMA only) comes back when the connector closes. 0 takes half the staging memory of both
    #: directions and the ring.
    quarantine_max_bytes: Size = 0
    #: Seconds that leaving the connector may take in all. What the store still holds then is kept alive and reported.
    shutdown_deadline_s: Seconds = 10.0
    #: What a fault inside the connector does to the program around it. "raise": its block ends with ConnectorBroken.
    #: "degrade": the block goes on without a cache, so lookups offer nothing and nothing is saved until another connector is
    #: opened. What fails while it opens is raised in either case.
    on_failure: Literal["raise", "degrade"] = "raise"
    #: True registers an `atexit` guard that waits for outstanding store calls and, if one never returns, leaves without
    #: finalising. False gives the exit to the application: a thread inside the store then aborts the process (SIGABRT).
    exit_guard: bool = True
    #: R: tokens behind a longer hit that a lookup may walk back to where a model with sliding windows can resume. What is
    #: saved at a prompt's end reaches as far back, as far as the engine still holds the pages.
    rewind_tokens: Tokens = DEFAULT_REWIND_TOKENS
    #: Whether a lookup of a model with sliding windows looks for a resumable end further back than the rewind.
    window_fallback: bool = True
    #: Whether the window pages of a prompt's end are stored ahead of its full-attention pages. A prompt without its window
    #: pages cannot be resumed at its end, and they cannot be read again.
    window_first: bool = True
    #: Slots that hold window pages from the pass that computed them until they are stored, each as large as the largest window
    #: page. 0 takes what two closing passes of this layout need, and at least 256. Unused without sliding windows.
    snapshot_slots: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    #: Milliseconds that a pass waits at most for such slots after its forward. Past it its window pages are dropped.
    snapshot_wait_ms: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    #: Bytes of device memory that window pages pass through on their way to those slots, so that the execution stream copies
    #: at the device's speed and not at the bus's. 0 copies to the host directly. Unused on a CPU.
    snapshot_device_bytes: Size = 256 * _MIB
    #: A sequence that computed at least so many tokens has its full-attention blocks, and the window pages of its end, listed
    #: again when its prompt is complete: probed, which renews their lease, and put where they are missing. 0 turns this off.
    resave_min_tokens: Tokens = 0
    #: Whether blocks that decoding completes are saved too, so that the next turn of a conversation finds them.
    save_generated: bool = True
    #: Seconds for which a finished request's pages are held for its saves at most. What has not begun by then is given up, so
    #: that a slow pool cannot keep the engine's memory. No deadline of a lookup or a load counts here.
    save_hold_max_s: Seconds = 60.0
    #: Seconds before blocks that were refused, by the pool or for a full backlog, are offered again.
    save_backoff_s: Seconds = 0.1
    #: Bytes of pages that may be handed over for saving at a time and not be saved yet. Requests hold those pages, so a pool
    #: that is slow must not gather all of them: what is beyond is refused, the ends of chains first. At least one block.
    backlog_bytes: Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)] = _GIB
    #: Passes that may have a save which has not ended.
    backlog_passes: Count = 64
    #: Seconds between two tellings of what the connector counted: event `akv.connector.stats`, and what `akv stat` shows. Only
    #: what changed is told. 0 tells nothing before it closes, and `akv stat` does not show it.
    stats_interval_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    #: Seconds between two looks at the device's events while any is outstanding. At least 0.001: event loops wake no finer.
    poll_tick_s: Annotated[float, msgspec.Meta(ge=SHORTEST_TICK_S)] = SHORTEST_TICK_S
