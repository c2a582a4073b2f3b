"""The demo's figures for a person: a table, and a sentence on what they mean."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from akv.cli.demo.jobs import Figures, TraceFigures
from akv.cli.demo.setting import DemoLayout


def show(figures: Figures, console: Console) -> None:
    """Print the figures."""
    times = figures.ttft_ms
    drafts = [
        ("of these pages, saved by process B", f"{figures.own_pages_compared:,} compared"),
        ("drafts accepted, rejected", f"{figures.drafts_accepted:,}, {figures.drafts_rejected:,}"),
    ]
    rows = (
        ("requests served by process B", f"{figures.requests:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("tokens from the pool", f"{figures.from_pool_tokens:,} of {figures.reusable_tokens:,} reusable"),
        ("reuse", f"{figures.reuse:.1%}"),
        ("lookups by what they found", ", ".join(f"{count} {name}" for name, count in figures.outcomes.items())),
        ("answers equal to local reuse, bit for bit", f"{figures.identical_to_local_reuse} of {figures.compared} compared"),
        ("pages from the pool that differ", f"{figures.page_mismatches} of {figures.pages_compared:,} compared"),
        *(drafts if DemoLayout(figures.layout).has_drafter else ()),
        (
            "loaded from, saved to the pool",
            f"{_mib(figures.bytes_loaded)}, {_mib(figures.bytes_saved)}",
        ),
        ("time to first token, computed", f"{times.cold:,.1f} ms"),
        ("time to first token, hit in the pool", f"{times.pool_hit:,.1f} ms"),
        ("time to first token, hit in the local cache", f"{times.local_hit:,.1f} ms"),
    )
    _print(console, "akv demo: process B served from what process A computed", rows, verdict(figures))


def verdict(figures: Figures) -> str:
    """One sentence."""
    if not figures.compared or not figures.pages_compared:
        return "FAILED: nothing came from the pool, so nothing could be compared."
    if figures.compares_too_little:
        return "FAILED: nothing of what process B had saved came from the pool, so it could not be compared."
    if figures.differs:
        return "FAILED: what came from the pool is not what local reuse gives."
    ratio = figures.ttft_ms.cold / figures.ttft_ms.pool_hit if figures.ttft_ms.pool_hit else 0.0
    return (
        f"The pool gave what local reuse gives, bit for bit; the first token came {ratio:.1f} times sooner than by computing."
    )


def show_trace(figures: TraceFigures, console: Console) -> None:
    """Print the figures of a replayed trace."""
    times, took = figures.ttft_ms, figures.replay_s
    rows = (
        (
            "requests of the trace, at a scale of",
            f"{figures.requests:,}, 1 : {figures.scale}, {figures.speed:g} times as fast",
        ),
        ("in flight at a time, at most", f"{figures.peak_in_flight:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("tokens from process B's own cache", f"{figures.local_tokens:,}"),
        ("tokens from the pool", f"{figures.from_pool_tokens:,} of {figures.reusable_tokens:,} reusable"),
        ("reuse", f"{figures.reuse:.1%}"),
        ("loads that failed", f"{figures.failed_loads:,}"),
        ("answers that differ", f"{figures.answer_mismatches} of {figures.answers_compared:,} compared"),
        ("pages from the pool that differ", f"{figures.page_mismatches} of {figures.pages_compared:,} compared"),
        ("pages that process A computed twice and not alike", f"{figures.reference_contradictions}"),
        ("loaded from, saved to the pool", f"{_mib(figures.bytes_loaded)}, {_mib(figures.bytes_saved)}"),
        ("time to first token, computed by process A", f"{times.computed:,.1f} ms"),
        ("time to first token, hit in the pool", f"{times.pool_hit:,.1f} ms"),
        ("replayed by process A, by process B in", f"{took.process_a:,.1f} s, {took.process_b:,.1f} s"),
    )
    _print(console, "akv demo: process B replayed a trace that process A had computed", rows, trace_verdict(figures))


def trace_verdict(figures: TraceFigures) -> str:
    """One sentence."""
    if not figures.pages_compared:
        return "FAILED: nothing came from the pool, so nothing could be compared."
    if figures.reference_contradictions:
        return "FAILED: process A computed pages twice and not alike, so what the pool has to hold is unknown."
    if figures.differs:
        return "FAILED: what came from the pool is not what process A computed."
    if figures.from_pool_tokens < figures.reusable_tokens:
        return "What came from the pool is what process A computed, bit for bit; some of it was not there any more."
    return "The pool gave all of what process A computed, bit for bit."


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]], sentence: str) -> None:
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(sentence)


def _mib(count: int) -> str:
    return f"{count / 1024**2:,.1f} MiB"
