"""`akv bench faults`: the master of a real pool, and then the holder of the pages, is frozen and killed under requests.

`run.py` tells the story; `figures.py` says what must come of it.
"""
