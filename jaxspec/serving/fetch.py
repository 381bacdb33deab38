"""Images by address: fetched from hosts that the server's owner allows, and from public addresses alone.

A name is resolved once, and the connection goes to the address that was checked. So a name cannot
lead to a machine of the server's own network, not even by answering differently the second time.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from jaxspec.options import FieldError, shown
from jaxspec.text.images import ImageError

_PORTS = {"http": 80, "https": 443}
_PIECE = 1 << 16


def fetch(field: str, url: str, hosts: Collection[str], *, max_bytes: int, end_s: float) -> bytes:
    """Return what is at an address. Redirections are refused.

    Args:
      field: of the address in errors.
      hosts: names that may be asked, in small letters.
      max_bytes: of the reply.
      end_s: when to give up, by `time.monotonic`.

    Raises:
      ImageError: the address is not allowed, or the reply is an error, too large or too late.
    """
    parts = _allowed(field, url, hosts)
    host, port = parts.hostname or "", _PORTS[parts.scheme]
    connection, timer = http.client.HTTPConnection(host, port), None
    try:
        connection.sock = sock = _connected(field, parts.scheme, host, port, end_s)
        # A limit of the whole: that of a socket begins anew with each byte.
        timer = threading.Timer(_left(end_s), sock.shutdown, [socket.SHUT_RDWR])
        timer.start()
        connection.default_port = port  # which the header Host leaves out
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "jaxspec"}
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ImageError(field, f"is answered by {host} with status {reply.status}, not 200")
        body = bytearray()
        while piece := reply.read1(_PIECE):
            body += piece
            if len(body) > max_bytes:
                raise ImageError(field, f"has more than {max_bytes >> 20} MiB at {host}")
        _left(end_s)
        if reply.length:
            raise ImageError(field, f"comes without its end from {host}")
        return bytes(body)
    except TimeoutError:
        raise ImageError(field, f"did not come in time from {host}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, FieldError):
            raise
        if time.monotonic() >= end_s:
            raise ImageError(field, f"did not come in time from {host}") from None
        why = f"{type(error).__name__}: {shown(str(error))}"
        raise ImageError(field, f"cannot be fetched from {host}: {why}") from None
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _allowed(field: str, url: str, hosts: Collection[str]) -> SplitResult:
    """Return the parts of an address that may be fetched."""
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
    except ValueError as error:
        raise ImageError(field, f"is no address: {error}") from None
    if parts.scheme not in _PORTS or has_port or parts.username is not None:
        raise ImageError(field, f"is {shown(url)}; expected https://, a host without port, a path")
    if (parts.hostname or "") not in hosts:
        raise ImageError(field, f"is at {shown(parts.hostname)}, which this server does not ask")
    if any(c <= " " or c > "~" for c in parts.path + parts.query):
        raise ImageError(field, "has a space, or a letter that has to be written as %…")
    return parts


def _connected(field: str, scheme: str, host: str, port: int, end_s: float) -> socket.socket:
    """Return a connection to a public address of a host."""
    addresses = _resolve(host, port)
    if not addresses or not all(_is_public(address[0]) for address in addresses):
        raise ImageError(field, f"is at {host}, which is no public address")
    plain = socket.create_connection(addresses[0][:2], timeout=_left(end_s))
    if scheme == "http":
        return plain
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host)


def _resolve(host: str, port: int) -> list[Any]:
    """Return the addresses of a host: a number and a port each, and perhaps more."""
    return [address for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _is_public(address: str) -> bool:
    number = ipaddress.ip_address(address.partition("%")[0])
    return number.is_global and not number.is_multicast


def _left(end_s: float) -> float:
    """Return the seconds that are left.

    Raises:
      TimeoutError: none are.
    """
    left = end_s - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
