"""Stand-ins for engines that do not run everywhere: each drives an adapter in the order in which its engine does."""
