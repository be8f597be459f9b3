"""The accelerator and the process it runs in."""

import resource
import sys

import pytest
import torch

from blockdraft.training.devices import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switch")
def test_freed_memory_is_reused() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            torch.ones(16 << 20)  # 64 MiB, above glibc's largest threshold for blocks of their own
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    # 16,384 pages each of the five times where nothing is kept, unless pages are huge. Where other tests left holes
    # in the heap, one of the five blocks may be new.
    assert faults() < 2 * 16_384
