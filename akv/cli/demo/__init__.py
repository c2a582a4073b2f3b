"""`akv demo`: KV that one process computed, found and loaded by another, and compared bit for bit.

`run.py` starts the processes, `children.py` holds them, `process.py` is what they run, `report.py` shows the result.
Conversations are saved by `saving.py` and served by `serving.py`, one request at a time. A trace is read by `trace.py`, made
smaller by `scaling.py`, and goes through `tracing.py` in both processes, as its requests overlap.
"""
