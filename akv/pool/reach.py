"""Whether a master answers, asked with the loop's own sockets and never through the store's client.

The client's `setup()` and `close()` hold the interpreter lock from beginning to end, for a minute and more when the master
does not answer, so no thread and no deadline helps once they began (O7). They are called only right after this question was
answered.
"""

import socket
import struct

import anyio

from akv.errors import PoolError

#: The master speaks coro_rpc: magic, version, serialisation, kind (a byte each), sequence number, function, lengths of the
#: body and of the attachment. No function has the id 0: a live master answers so, and changes and logs nothing.
_MAGIC = 21
_SEQUENCE = 0x616B76
_QUESTION = struct.pack("<BBBBIIII", _MAGIC, 0, 0, 0, _SEQUENCE, 0, 0, 0)
#: Magic, version, error, kind, sequence number: as much of the answer as proves who spoke.
_ANSWER = struct.Struct("<BBBBI")


async def reach_master(address: str, deadline_s: float) -> None:
    """Return once the master at `address` has answered a question that has no effect.

    `address` is "host:port", as `check_settings()` lets it pass. Raises PoolError with the address and the likely cause: host
    unknown, nothing listens, somebody else listens, or no answer within `deadline_s` seconds (a frozen master still accepts
    connections, so connecting proves nothing).

    **Cancellation:** the connection is closed, nothing else was touched.
    """
    host, _, port = address.rpartition(":")
    try:
        with anyio.fail_after(deadline_s):
            async with await anyio.connect_tcp(host.strip("[]"), int(port)) as stream:
                await stream.send(_QUESTION)
                answer = b""
                while len(answer) < _ANSWER.size:
                    answer += await stream.receive()
    except TimeoutError:
        cause = f"it did not answer within {deadline_s:g} s: it hangs, is overloaded, or a firewall drops the packets"
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        cause = "what listens there hung up: it is not the RPC port of a mooncake_master (its metrics port, perhaps)"
    except socket.gaierror as error:
        cause = f"its host name cannot be resolved ({error})"
    except OSError as error:
        cause = f"nothing accepts connections there ({error}): the master is not running, or listens elsewhere"
    else:
        magic, _, _, _, sequence = _ANSWER.unpack_from(answer)
        if (magic, sequence) == (_MAGIC, _SEQUENCE):
            return
        cause = "what answers there is not the RPC port of a mooncake_master"
    raise PoolError(f"the pool's master at {address} is of no use: {cause}. Check store.master_address and the master's log.")
