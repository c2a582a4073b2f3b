"""Adapters, one for each engine. Each imports its engine lazily and alone: importing akv, or another adapter, loads none."""
