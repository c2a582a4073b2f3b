"""Stand-ins for engines: each drives an adapter in the order of calls of its engine, on real bytes and without a model."""
