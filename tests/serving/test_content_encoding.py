"""Bodies that a client has compressed."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from blockdraft.serving.content_encoding import decode_body
from blockdraft.serving.errors import ApiError


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_bomb_is_not_decoded_whole(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    bomb = encode(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="exceeds 10000 bytes") as raised:
            decode_body(bomb, encoding, 10_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 and raised.value.status == 413
    finally:
        tracemalloc.stop()


def test_limits_and_parts() -> None:
    body = bytes(10_000)
    assert decode_body(gzip.compress(body), "GZIP", 10_000) == body
    assert decode_body(gzip.compress(body[:4]) + gzip.compress(body[4:]), "x-gzip", 10_000) == body
    assert decode_body(zlib.compress(gzip.compress(body)), "gzip, deflate", 10_000) == body
    assert decode_body(body, " identity,", 10_000) == body
    with pytest.raises(ApiError, match=r"must be one of gzip, deflate.*, got 'lzma'") as raised:
        decode_body(body, "lzma", 10_000)
    assert raised.value.status == 415 and "gzip" in raised.value.headers["Accept-Encoding"]


def test_many_parts_take_linear_time() -> None:
    """So that a body of a few megabytes cannot stop a server for seconds."""
    body = gzip.compress(b"") * 100_000 + gzip.compress(b"{}")
    assert decode_body(body, "gzip", 2**20) == b"{}"
