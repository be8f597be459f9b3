"""Quantized matrices of GGUF files as a GPU gets them, multiplied by Triton's interpreter on a CPU."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf_models import model_of
from gguf_writer import write_gguf
from torch import Tensor

from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.stored import dense
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.packed import PackedLinear
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.targets.families import decoder_config
from blockdraft.targets.gguf.checkpoint import fusing_on_gpu, held_on_gpu
from blockdraft.targets.gguf.config import gguf_config
from blockdraft.targets.gguf.tensors import decoder_weights

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 96}
MIXED = {"attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q6_K", "ffn_": "Q4_K", "token": "Q6_K", "output.": "Q4_0"}
pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 runs them, which Triton reads when torch loads it", allow_module_level=True)
from blockdraft.kernels.cuda.quantized_product import PackedCodes  # noqa: E402


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [(MIXED, 4 * 3 + 1), ("Q4_0", 4 * 3 + 1), ({"token": "MXFP4", "attn": "F16", "ffn": "Q5_1"}, 2 * 3)],
)
def test_logits_are_those_of_dequantized_weights(kinds: str | dict[str, str], kept: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, model_of("qwen2", **WIDE), kinds)
    file = open_gguf(path)
    wanted = decoder_config(gguf_config(file))
    weights = decoder_weights(file, wanted)

    def read(name: str) -> Tensor | QuantizedWeight:
        return weights.read(name)

    def read_dense(name: str) -> Tensor:
        return dense(read(name)).float()

    fused = fusing_on_gpu(read, torch.device("cpu"), torch.float32)
    logits = []
    for decoder in (Decoder(wanted, read_dense), Decoder(wanted, read_dense, fused)):
        tokens, at = torch.tensor([[5, 80, 9]]), torch.arange(3)
        stores = torch.zeros(3, 1, 2 * wanted.num_kv_heads, 3, wanted.head_dim).unbind(0)
        with torch.no_grad():
            logits.append(decoder(tokens, at[None], at, [None], stores)[0])
    layers = {layer for layer in decoder.modules() if isinstance(layer, PackedLinear)}
    assert sum(isinstance(layer.quantized, PackedCodes) for layer in layers) == kept
    matrices = sum(layer.nbytes - (0 if layer.bias is None else layer.bias.nbytes) for layer in layers)
    needed = weights.nbytes(torch.float32, True, partial(held_on_gpu, dtype=torch.float32))
    assert kinds == MIXED or matrices <= needed
    torch.testing.assert_close(logits[1], logits[0], atol=0.02 * float(logits[0].abs().max()), rtol=0)
