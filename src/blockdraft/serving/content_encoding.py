"""Decodes request bodies that a client has compressed (RFC 9110, section 8.4)."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

from blockdraft.serving.errors import ApiError

# Returns at most as many bytes as the number says, and whether the input ended there.
Decoder: TypeAlias = Callable[[bytes, int], "tuple[bytes, bool]"]


def decode_body(body: bytes, encodings: str, limit: int) -> bytes:
    """Return a body without its encodings.

    Args:
        encodings: Value of the header Content-Encoding, in the order in which they were applied.
        limit: Maximum bytes of the decoded body.

    Raises:
        ApiError: An encoding is unknown here (415), or the body does not have it (400) or is too large (413).
    """
    for name in reversed([name.strip().lower() for name in encodings.split(",")]):
        if name in ("", "identity"):
            continue
        decoder = _decoder(name)
        if decoder is None:
            known = ", ".join(name for name in ("gzip", "deflate", "zstd", "br") if _decoder(name))
            raise ApiError(
                415,
                f"The content encoding must be one of {known}, got {name[:80]!r}; send the body without it.",
                headers={"Accept-Encoding": known},
            )
        try:
            body, ended = decoder(body, limit + 1)
        except Exception as error:  # each library has its own
            raise ApiError(400, f"The body is not valid {name}: {error}.") from error
        if len(body) > limit:
            raise ApiError(413, f"The decoded body exceeds {limit} bytes; send less, or use a larger --max-body.")
        if not ended:
            raise ApiError(400, f"The body is not valid {name}: it is truncated.")
    return body


def _decoder(name: str) -> Decoder | None:
    """Return the decoder of an encoding, or None if no installed library has it."""
    if name in ("gzip", "x-gzip"):
        return _gzip
    if name == "deflate":
        return _deflate
    if name == "zstd":
        return _zstd()
    return _brotli() if name == "br" else None


def _gzip(data: bytes, most: int) -> tuple[bytes, bool]:
    file = gzip.GzipFile(fileobj=io.BytesIO(data))  # reads several parts in linear time
    try:
        return file.read(most), True
    except EOFError:
        return b"", False


def _deflate(data: bytes, most: int) -> tuple[bytes, bool]:
    try:
        decoder = zlib.decompressobj()
        return decoder.decompress(data, most), decoder.eof
    except zlib.error:  # some clients leave out zlib's header
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        return decoder.decompress(data, most), decoder.eof


def _zstd() -> Decoder | None:
    if library := _first("compression.zstd", "backports.zstd"):

        def decode(data: bytes, most: int) -> tuple[bytes, bool]:
            decoder = library.ZstdDecompressor()
            return decoder.decompress(data, most), decoder.eof

        return decode
    if library := _first("zstandard"):

        def decode_stream(data: bytes, most: int) -> tuple[bytes, bool]:
            decoded = library.ZstdDecompressor().stream_reader(data).read(most)
            if len(decoded) == most:
                return decoded, False
            decoder = library.ZstdDecompressor().decompressobj()  # which has no limit, but knows the end
            return decoder.decompress(data), decoder.eof

        return decode_stream
    return None


def _brotli() -> Decoder | None:
    library = _first("brotli")
    if library is None:
        return None

    def decode(data: bytes, most: int) -> tuple[bytes, bool]:
        decoder = library.Decompressor()
        decoded = decoder.process(data, output_buffer_limit=most)
        return decoded, decoder.is_finished()

    return decode


def _first(*names: str) -> Any:
    """Return the first of some modules that is installed, or None."""
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None
