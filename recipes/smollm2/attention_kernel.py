"""Attention of `batched.py` as a Triton kernel: a program reads the slots of one row and one key/value head."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64  # slots at a time


@triton.jit
def attend_rows(
    queries,
    keys,
    values,
    lengths,
    out,
    slots,
    key_stride,
    value_stride,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr = BLOCK,
):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # strides of many rows are beyond 32 bits
    length = tl.load(lengths + row)
    group, place, channel = tl.arange(0, 16), tl.arange(0, BLOCK), tl.arange(0, SIZE)
    own = (row * tl.num_programs(1) + head) * GROUP * SIZE + group[:, None] * SIZE + channel[None, :]
    begin = row.to(tl.int64) * slots * SIZE
    inside = group[:, None] < GROUP
    query = tl.load(queries + own, mask=inside, other=0.0)
    most = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    found = tl.zeros([16, SIZE], tl.float32)
    for at in range(0, length, BLOCK):
        seen = at + place < length
        offset = begin + (at + place)[:, None] * SIZE + channel[None, :]
        key = tl.load(keys + head * key_stride + offset, mask=seen[:, None], other=0.0)
        value = tl.load(values + head * value_stride + offset, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
        new = tl.maximum(most, tl.max(scores, 1))
        shares = tl.exp(scores - new[:, None])
        kept = tl.exp(most - new)
        total = total * kept + tl.sum(shares, 1)
        found = found * kept[:, None] + tl.dot(shares.to(value.dtype), value)
        most = new
    tl.store(out + own, (found / total[:, None]).to(query.dtype), mask=inside)
