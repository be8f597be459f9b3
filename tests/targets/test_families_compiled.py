"""Layers of every family that CUDA graphs hold, traced by torch.compile as one graph without a break."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from captured_forwards import Recorder
from thinned import LONG, thinned
from tiny_families import FAMILIES, write_model
from torch._dynamo.utils import counters

from blockdraft.decode.proposal import chain_parents
from blockdraft.kernels.cuda.compiler import Compiler
from blockdraft.kernels.cuda.graphs import room
from blockdraft.targets import load_target
from blockdraft.targets.native import NativeTarget


@pytest.mark.slow
@pytest.mark.parametrize("family", thinned(FAMILIES, keep=4, marks=LONG))
def test_layers_are_one_graph(family: str, tmp_path: Path, constants: Callable[..., None]) -> None:
    write_model(family, tmp_path)
    try:
        plain, compiled = (
            load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="off") for _ in range(2)
        )
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(plain, NativeTarget) and isinstance(compiled, NativeTarget)
    if plain.decoder.config.unusual:
        pytest.skip(f"CUDA graphs know no {plain.decoder.config.unusual}")
    constants("blockdraft.kernels.cuda.compiler", BACKEND="aot_eager")  # no C++ to compile
    torch.compiler.reset()
    counters.clear()
    compiled.capture(Recorder(), Compiler(torch.device("cpu"), in_background=False))
    logits = []
    for target in (plain, compiled):
        cache, tokens = target.new_cache(2, room(20)), torch.arange(10).view(2, 5) + 7
        logits.append(target.forward(tokens, chain_parents(2, 5), cache, (0, 2)).logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 3  # for one node, and for several of sequences in two layouts
    assert not counters["graph_break"]
