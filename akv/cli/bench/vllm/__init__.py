"""`akv bench vllm`: one vLLM with no connector, with its own one for Mooncake stores, and with akv's, in turn on one machine.

`run.py` asks the servers; `figures.py` says what must come of it.
"""
