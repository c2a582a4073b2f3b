"""What akv needs from the world, as Protocols: a pool, a device, and somebody to run blocking calls.

Mooncake and torch appear only behind them, in `akv.pool` and `akv.device`; the fakes of `akv_testing` implement the same
Protocols and pass the same conformance suites.
"""
