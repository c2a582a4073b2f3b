"""What tests of akv, and of servers that embed akv, are made of.

- virtual time on asyncio and trio: `akv_testing.clock`, and the fixtures of `akv_testing.pytest_backends`;
- tasks that take turns: `Sequencer`;
- fakes of the ports, with scripted faults: `fake_ports()`, or `FakePool` on a `FakeStore`, `FakeDevice`, `FakeRunner`;
- suites that every implementation of a port must pass: `akv_testing.conformance` (import it where pytest collects it).

What the fakes raise when a port is misused stands in `akv_testing.errors`.
"""

from akv_testing.calls import FakeRunner, Gate, Latency
from akv_testing.clock import ManualClock, run_virtual, settle, virtual_backend
from akv_testing.device import FakeDevice
from akv_testing.errors import MisuseError, UnorderedAccess
from akv_testing.memory import FakeHostBuffer
from akv_testing.pool import FakePool
from akv_testing.ports import FakePorts, fake_ports, tiny_layout
from akv_testing.sequencer import Sequencer
from akv_testing.store import FakeStore

__all__ = [
    "FakeDevice",
    "FakeHostBuffer",
    "FakePool",
    "FakePorts",
    "FakeRunner",
    "FakeStore",
    "Gate",
    "Latency",
    "ManualClock",
    "MisuseError",
    "Sequencer",
    "UnorderedAccess",
    "fake_ports",
    "run_virtual",
    "settle",
    "tiny_layout",
    "virtual_backend",
]
