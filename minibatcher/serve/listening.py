"""The address that a server listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from ..errors import InvalidParameter


def listen_on(host: str, port: int) -> socket.socket:
    """A socket of this machine's address; port 0 takes a free one. It does not accept anybody yet.

    Raises InvalidParameter with what is in the way.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidParameter(f"unknown host {host!r} ({error}); give an address such as 127.0.0.1 or ::1") from error
    family, kind, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)  # localhost has two
    # asyncio sends small packets at once (TCP_NODELAY) only where the socket says that it is TCP.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InvalidParameter(what_is_in_the_way(host, port, error)) from error
    return listener


def what_is_in_the_way(host: str, port: int, error: OSError) -> str:
    """Why an address can't be had, as a sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; take another with --port (0: any that is free)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} may not be opened by this user; take one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; give one that is, such as 127.0.0.1"
    return f"can't listen on {host} port {port}: {error.strerror or error}"


def url_of(listener: socket.socket) -> str:
    """Where clients find it: http://127.0.0.1:8000"""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
