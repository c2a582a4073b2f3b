"""Every decision that can be taken without waiting: pure, synchronous, tested with tables and properties."""
