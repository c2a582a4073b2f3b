"""Every asynchronous test runs on asyncio and on trio, under virtual time unless its module asks for real time.

How a module asks is told in `akv_testing.pytest_backends`.
"""

from akv_testing.pytest_backends import virtual_backends

anyio_backend = virtual_backends
