"""The demo's figures for a person: a table, and a sentence on what they mean."""

from rich.console import Console
from rich.table import Table

from akv.cli.demo.jobs import Figures


def show(figures: Figures, console: Console) -> None:
    """Print the figures."""
    times = figures.ttft_ms
    table = Table(title="akv demo: process B served from what process A computed", show_header=False)
    for name, value in (
        ("requests served by process B", f"{figures.requests:,}"),
        ("prompt tokens", f"{figures.prompt_tokens:,}"),
        ("tokens from the pool", f"{figures.from_pool_tokens:,} of {figures.reusable_tokens:,} reusable"),
        ("reuse", f"{figures.reuse:.1%}"),
        ("answers equal to local reuse, bit for bit", f"{figures.identical_to_local_reuse} of {figures.compared} compared"),
        ("pages from the pool that differ", f"{figures.page_mismatches} of {figures.pages_compared:,} compared"),
        (
            "loaded from, saved to the pool",
            f"{figures.bytes_loaded / 1024**2:,.1f} MiB, {figures.bytes_saved / 1024**2:,.1f} MiB",
        ),
        ("time to first token, computed", f"{times.cold:,.1f} ms"),
        ("time to first token, hit in the pool", f"{times.pool_hit:,.1f} ms"),
        ("time to first token, hit in the local cache", f"{times.local_hit:,.1f} ms"),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print(verdict(figures))


def verdict(figures: Figures) -> str:
    """One sentence."""
    if not figures.compared or not figures.pages_compared:
        return "FAILED: nothing came from the pool, so nothing could be compared."
    if figures.differs:
        return "FAILED: what came from the pool is not what local reuse gives."
    ratio = figures.ttft_ms.cold / figures.ttft_ms.pool_hit if figures.ttft_ms.pool_hit else 0.0
    return (
        f"The pool gave what local reuse gives, bit for bit; the first token came {ratio:.1f} times sooner than by computing."
    )
