"""A request's way, one file per step: lookup, reserve, load, save, release. Each names the file of `plan/` that decides for
it.

These are thin: they wait for what `ownership/` says to wait for, and carry out what `plan/` decided. `calls.py` is how any of
them reaches a thread, `overlap.py` how a load and a save keep the store and the device busy at the same time.
"""
