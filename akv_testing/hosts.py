"""Two hosts on one machine: namespaces of network, processes, mounts and users, joined by a cable. For tests of a pool
that spans hosts, or containers.

A test runs `host_command()` with a script: the first process of a host of its own. That script may start another host with
`second_host()`. It takes no privileges where the kernel lets users make namespaces, and no program but util-linux's.
"""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from akv_testing.processes import children_of

#: Addresses of the two hosts, which both can see.
FIRST, SECOND = "10.77.0.1", "10.77.0.2"

_CABLE, _OTHER_END, _PREFIX_BITS = "akv0", "akv1", 24
#: Of Linux's rtnetlink: types of messages, their flags, attributes of links and addresses.
_NEW_LINK, _NEW_ADDRESS = 16, 20
_REQUEST, _ACKNOWLEDGE, _CREATE, _EXCLUSIVE = 0x1, 0x4, 0x400, 0x200
_NAME, _OF_PROCESS, _KIND, _NESTED_KIND, _NESTED_DATA, _PEER = 3, 19, 18, 1, 2, 1
_LOCAL, _ADDRESS = 2, 1
_UP = 1


def host_command(script: str, *arguments: str) -> list[str]:
    """The command that runs a script as the first process of a new host, as its root. It calls `settle_in()` first."""
    return ["unshare", "--user", "--map-root-user", *_namespaces(processes=True), sys.executable, "-c", script, *arguments]


def can_make_hosts() -> bool:
    """Whether this user may make namespaces here. In a container that is forbidden as a rule."""
    command = host_command("from akv_testing.hosts import settle_in; settle_in(own_shared_memory=True)")
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 - our own command
    except FileNotFoundError:
        return False


def settle_in(*, own_shared_memory: bool) -> None:
    """Give this host a loopback, and shared memory of its own if it is to have one."""
    _switch_on("lo")
    if own_shared_memory:
        # A namespace of mounts shows what its parent has until something is mounted over it.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)  # noqa: S607, S108


@contextmanager
def second_host(script: str, *arguments: str, own_processes: bool = True) -> Iterator["subprocess.Popen[str]"]:
    """Run a script on another host, which has a cable to this one, until its standard input is closed.

    It calls `plug_in()` first. With `own_processes` False it sees the processes of this host, as a container can that has a
    network of its own.
    """
    command = ["unshare", *_namespaces(processes=own_processes), sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline(), "it ended before it began"
        # The first process of a new namespace of processes is a child of unshare's; else it is unshare itself that became it.
        (first,) = children_of(process.pid) if own_processes else (process.pid,)
        _lay_cable(first)
        _give_address(_CABLE, FIRST)
        process.stdin.write("\n")
        process.stdin.flush()
        yield process
        process.stdin.close()


def plug_in(*, own_shared_memory: bool) -> None:
    """Called on the second host, from the first process: settle in, wait for the cable, take an address."""
    settle_in(own_shared_memory=own_shared_memory)
    print("ready", flush=True)  # noqa: T201 - `second_host` reads it
    sys.stdin.readline()
    _give_address(_OTHER_END, SECOND)


def _namespaces(*, processes: bool) -> list[str]:
    # What runs on a host ends with its first process.
    return ["--net", "--mount", *(["--pid", "--fork", "--kill-child", "--mount-proc"] if processes else [])]


def _lay_cable(other_process: int) -> None:
    """Make two devices, of which each receives what the other sends: one here, and one in the network of a process."""
    peer = _link() + _attribute(_NAME, _text(_OTHER_END)) + _attribute(_OF_PROCESS, struct.pack("=I", other_process))
    veth = _attribute(_NESTED_KIND, b"veth") + _attribute(_NESTED_DATA, _attribute(_PEER, peer))
    _ask(_NEW_LINK, _CREATE | _EXCLUSIVE, _link() + _attribute(_NAME, _text(_CABLE)) + _attribute(_KIND, veth))


def _give_address(device: str, address: str) -> None:
    number = socket.inet_aton(address)
    body = struct.pack("=BBBBI", socket.AF_INET, _PREFIX_BITS, 0, 0, socket.if_nametoindex(device))
    _ask(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, body + _attribute(_LOCAL, number) + _attribute(_ADDRESS, number))
    _switch_on(device)


def _switch_on(device: str) -> None:
    _ask(_NEW_LINK, 0, _link(socket.if_nametoindex(device), _UP))


def _link(index: int = 0, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _attribute(kind: int, value: bytes) -> bytes:
    header = struct.pack("=HH", 4 + len(value), kind)
    return header + value + bytes(-len(value) % 4)


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def _ask(kind: int, flags: int, body: bytes) -> None:
    """Send the kernel one message and wait for its answer. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _ACKNOWLEDGE | flags, 0, 0) + body)
        # A header, and the code, negative or 0.
        code = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))
