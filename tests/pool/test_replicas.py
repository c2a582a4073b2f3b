"""What the client's descriptors say (R2)."""

from enum import IntEnum
from typing import Any

import pytest

from akv.pool.replicas import read_replicas
from akv.values.segments import Replica


class ReplicaStatus(IntEnum):
    """As the client's own: its text has the name of the class in it."""

    PROCESSING = 2
    COMPLETE = 3

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Descriptor:
    """A descriptor, and each of its parts."""

    def __init__(self, address: int = 0, *, memory: bool = True, status: ReplicaStatus = ReplicaStatus.COMPLETE) -> None:
        self.transport_endpoint, self.buffer_address, self.size = "host:1", address, 10
        self.status, self._memory = status, memory
        self.buffer_descriptor = self

    def is_memory_replica(self) -> bool:
        return self._memory

    def get_memory_descriptor(self) -> "Descriptor":
        return self


def test_R2_each_key_has_the_first_replica_that_lies_in_memory() -> None:
    raw = {"a": [Descriptor(memory=False), Descriptor(7), Descriptor(8)], "b": [], "c": [Descriptor(memory=False)]}
    assert read_replicas(raw, ["b", "a", "missing", "c", "a"]) == [
        None,
        Replica("host:1", 7, 10),
        None,
        None,
        Replica("host:1", 7, 10),
    ]


def test_R2_a_replica_is_complete_if_its_status_says_so() -> None:
    raw = {"a": [Descriptor(status=ReplicaStatus.PROCESSING)], "b": [Descriptor()]}
    for _ in range(2):
        states = [replica and replica.complete for replica in read_replicas(raw, ["a", "b"])]
        assert states == [False, True]


@pytest.mark.parametrize("raw", [None, [], 7, "text"])
def test_R2_an_answer_of_another_form_names_no_place(raw: Any) -> None:
    assert read_replicas(raw, ["a", "b"]) == [None, None]
