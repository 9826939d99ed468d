"""Descriptors that one would rather not be sent: whoever closes the last copy waits."""

import array
import os
import socket
import struct

LINGERS = 60  # seconds; longer than any of ours waits


def lingering(sockets: list[socket.socket]) -> int:
    """Return a TCP socket whose close waits for a peer that never reads; the peer is added to `sockets`."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    peer, _address = server.accept()
    sockets += [server, peer]
    client.setblocking(False)
    try:
        while True:
            client.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, LINGERS))
    return client.detach()


def enclosed(fds: list[int]) -> int:
    """Return a local socket on whose way these descriptors, which are closed here, are."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    for fd in fds:
        os.close(fd)
    one.close()
    return other.detach()
