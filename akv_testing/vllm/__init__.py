"""A real vLLM on a machine without a GPU, for tests and measurements of akv's connector in it.

Tiny models with weights that follow from their names (`models`, `weights`), in server processes of their own (`nursery` forks
them, `engine` serves in them), asked from here (`client`). Only the server processes import vLLM.
"""
