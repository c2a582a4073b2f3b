"""`akv bench engine`: what akv costs and saves beside an engine of a realistic shape, on a GPU.

`run.py` asks in turn, `servers.py` has the three engines that are asked, `beside.py` looks at a request that decodes while
others load, `loads.py` reads off akv's events what was read how, and `figures.py` says what must come of it.
"""
