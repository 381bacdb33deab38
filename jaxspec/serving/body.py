"""Bodies of requests, as bytes: how much, how fast, and compressed or not."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import ClientDisconnect, Request

from jaxspec.options import shown
from jaxspec.serving.disconnect import ClientDisconnected
from jaxspec.serving.errors import ApiError
from jaxspec.serving.settings import Settings

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return a request's body, decompressed.

    Raises:
      ApiError: the body is too large, too slow, or compressed in a way that cannot be read.
      ClientDisconnected: the client closed the connection before the end of the body.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        message = f"content-encoding is {shown(encoding)}; expected gzip, deflate or identity"
        raise ApiError(415, message)
    inflater = None if encoding == "identity" else zlib.decompressobj(_GZIP_OR_ZLIB)
    max_bytes, body = settings.max_body_mib * 2**20, bytearray()
    try:
        async with asyncio.timeout(settings.client_timeout):
            async for chunk in request.stream():
                if inflater is not None:
                    chunk = inflater.decompress(chunk, max_bytes + 1 - len(body))
                body += chunk
                if len(body) > max_bytes:
                    raise ApiError(413, f"the body has more than {settings.max_body_mib} MiB")
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        message = f"the body did not come in {settings.client_timeout:g} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    except zlib.error:
        raise ApiError(400, f"the body is not compressed by {encoding}") from None
    if inflater is not None and not inflater.eof:
        raise ApiError(400, f"the end of the body is missing, which is compressed by {encoding}")
    return bytes(body)
