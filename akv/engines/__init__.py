"""Adapters: one package for each engine, which imports its engine lazily and nothing of any other."""
