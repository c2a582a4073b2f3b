"""`akv demo`: KV that one process computed, found and loaded by another, and compared bit for bit with local reuse.

`run.py` starts the processes, `process.py` is what they run, `saving.py` and `serving.py` are the two parts, `report.py` shows
the result.
"""
