"""`akv bench reads`: pages from memory that another process of this host lends, and saves into memory that was touched before.

`run.py` tells the story, `engine.py` has the pages that are moved, `saves.py` is its second part, and `figures.py` says what
must come of it.
"""
