"""Quantized checkpoints of other programs, against packing done value by value."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from thinned import thinned
from tiny_families import write_model
from torch import Tensor

from blockdraft.formats.quantized import NotRead, read_quantized
from blockdraft.formats.stored import FEW_BITS, MadeTensor, StoredTensor
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.nn.quantize_weight import quantize_weight
from blockdraft.targets import load_target
from blockdraft_tools.model_folder import parts_of

OUT, IN, GROUP = 16, 64, 32
NAME = "model.layers.0.mlp.up_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Parts = dict[str, Tensor]


def word(values: list[int], bits: int) -> int:
    """Values from 0 up, packed into one int32, the first in the lowest bits."""
    number = sum(value << bits * place for place, value in enumerate(values))
    return number - (1 << 32) if number >= 1 << 31 else number


def words(values: list[int], bits: int) -> list[int]:
    size = 32 // bits
    padded = values + [0] * (-len(values) % size)
    return [word(padded[at : at + size], bits) for at in range(0, len(padded), size)]


class Drawn:
    """A weight `(value - zero) * scale`, `[out, in]`, of random whole numbers."""

    def __init__(self, bits: int, symmetric: bool, shape: tuple[int, int] = (OUT, IN), group: int = GROUP) -> None:
        generator = torch.Generator().manual_seed(bits)
        self.bits, self.group, (self.out, self.inputs) = bits, group, shape
        groups = self.inputs // group
        self.values = torch.randint(0, 1 << bits, shape, generator=generator)
        drawn = torch.randint(1, 1 << bits, (self.out, groups), generator=generator)
        self.zeros = torch.full((self.out, groups), 1 << bits - 1) if symmetric else drawn
        self.scale = (torch.rand(self.out, groups, generator=generator) / 50 + 0.001).half()

    def number(self, row: int, column: int) -> float:
        at = column // self.group
        return float((self.values[row, column] - self.zeros[row, at]) * self.scale[row, at].float())

    def numbers(self) -> Tensor:
        return torch.tensor([[self.number(row, column) for column in range(self.inputs)] for row in range(self.out)])


def gptq(drawn: Drawn, less: int = 1, name: str = NAME) -> Parts:
    values, zeros, bits = drawn.values.tolist(), (drawn.zeros - less).tolist(), drawn.bits
    columns = [words(values[row], bits) for row in range(drawn.out)]
    lines = [words([zeros[row][at] for row in range(drawn.out)], bits) for at in range(len(zeros[0]))]
    return {
        f"{name}.qweight": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
        f"{name}.qzeros": torch.tensor(lines, dtype=torch.int32),
        f"{name}.scales": drawn.scale.T.contiguous(),
        f"{name}.g_idx": torch.tensor([at // drawn.group for at in range(drawn.inputs)], dtype=torch.int32),
    }


def awq(drawn: Drawn, name: str = NAME) -> Parts:
    def lines(table: list[list[int]]) -> Tensor:
        """`[out][n]` as words `[n, out / 8]`."""
        rows = []
        for column in range(len(table[0])):
            eights = [[table[at + place][column] for place in AWQ_ORDER] for at in range(0, len(table), 8)]
            rows.append([word(eight, 4) for eight in eights])
        return torch.tensor(rows, dtype=torch.int32)

    return {
        f"{name}.qweight": lines(drawn.values.tolist()),
        f"{name}.qzeros": lines(drawn.zeros.tolist()),
        f"{name}.scales": drawn.scale.T.contiguous(),
    }


def compressed(drawn: Drawn, name: str = NAME) -> Parts:
    bits, zeros = drawn.bits, drawn.zeros.tolist()
    parts = {
        f"{name}.weight_packed": torch.tensor([words(row, bits) for row in drawn.values.tolist()], dtype=torch.int32),
        f"{name}.weight_scale": drawn.scale,
        f"{name}.weight_shape": torch.tensor([drawn.out, drawn.inputs]),
    }
    if bool((drawn.zeros != 1 << bits - 1).any()):
        lines = [words([zeros[row][at] for row in range(drawn.out)], bits) for at in range(len(zeros[0]))]
        parts[f"{name}.weight_zero_point"] = torch.tensor(lines, dtype=torch.int32).T.contiguous()
    return parts


def scheme(bits: int = 4, **differences: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights, **differences.pop("group", {})}
    raw = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return raw | differences


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
LAYOUTS: list[tuple[str, int, dict[str, Any], Callable[[Drawn], Parts]]] = [
    ("gptq", 4, GPTQ, gptq),
    ("gptq 8", 8, GPTQ | {"bits": 8}, gptq),
    ("gptq v2", 4, GPTQ | {"checkpoint_format": "gptq_v2"}, lambda drawn: gptq(drawn, 0)),
    ("awq", 4, AWQ, awq),
    ("compressed", 4, scheme(), compressed),
    ("compressed 8", 8, scheme(8), compressed),
]


def read(raw: dict[str, Any], parts: Parts) -> QuantizedWeight:
    actual = read_quantized(raw, of_file(parts))[f"{NAME}.weight"]
    weight = actual.read()
    assert isinstance(weight, QuantizedWeight) and actual.kind == FEW_BITS and actual.shape == tuple(weight.shape)
    return weight


def of_file(parts: Parts) -> dict[str, StoredTensor]:
    names = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}

    def one(tensor: Tensor) -> StoredTensor:
        return MadeTensor(tuple(tensor.shape), names[tensor.dtype], lambda: tensor)

    return {name: one(tensor) for name, tensor in parts.items()}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "raw", "pack"), [case[1:] for case in LAYOUTS], ids=[case[0] for case in LAYOUTS])
def test_every_number_is_that_of_the_file(
    bits: int, raw: dict[str, Any], pack: Callable[[Drawn], Parts], symmetric: bool
) -> None:
    drawn = Drawn(bits, symmetric)
    weight = read(raw, pack(drawn))
    assert weight.bits == bits and weight.group == GROUP and (weight.offset is None) == symmetric
    torch.testing.assert_close(weight.dequantize(), drawn.numbers(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_written_is_read(bits: int, symmetric: bool) -> None:
    drawn = Drawn(bits, symmetric, (12, IN))  # rows that do not fill a word of zero points
    parts = compressed(drawn)
    again = parts_of(NAME, read(scheme(bits), parts))
    assert again.keys() == parts.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in parts.items())


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_may_be_one_group(bits: int) -> None:
    for rows in (1, 32 // bits):
        weight = quantize_weight(torch.randn(rows, IN), bits, IN, zero_points=True)
        again = read(scheme(bits), parts_of(NAME, weight))
        torch.testing.assert_close(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_zeros_have_their_zero_in_the_middle(bits: int) -> None:
    parts = parts_of(NAME, quantize_weight(torch.zeros(32 // bits, IN), bits, IN, zero_points=True))
    assert parts[f"{NAME}.weight_zero_point"].tolist() == [words([1 << bits - 1] * (32 // bits), bits)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_project_compressed_tensors_reads_and_writes_the_same(bits: int, symmetric: bool) -> None:
    oracle = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    drawn = Drawn(bits, symmetric)
    arguments = scheme(bits)["config_groups"]["group_0"]
    arguments["weights"]["symmetric"] = symmetric
    described = quantization.QuantizationScheme(**arguments)
    middle = 1 << bits - 1
    given = {"weight": drawn.numbers(), "weight_scale": drawn.scale.float()}
    if not symmetric:
        given["weight_zero_point"] = (drawn.zeros - middle).to(torch.int8)
    written = oracle.PackedQuantizationCompressor.compress(given, described)
    parts = {f"{NAME}.{part}": tensor for part, tensor in written.items()}
    weight = read(scheme(bits), parts)
    torch.testing.assert_close(weight.dequantize(), drawn.numbers(), rtol=1e-6, atol=1e-6)
    ours = {name.rpartition(".")[2]: tensor for name, tensor in parts_of(NAME, weight).items()}
    theirs = oracle.PackedQuantizationCompressor.decompress(ours, described)["weight"]
    torch.testing.assert_close(theirs.float(), drawn.numbers(), rtol=2e-3, atol=1e-4)  # theirs is in float16


@pytest.mark.parametrize(("columns", "zeros"), [(1, False), (2, True)])
def test_int8_may_lie_as_it_is(columns: int, zeros: bool) -> None:
    drawn = Drawn(8, not zeros, group=IN // columns)
    parts = {f"{NAME}.weight": (drawn.values - 128).to(torch.int8), f"{NAME}.weight_scale": drawn.scale}
    if zeros:
        parts[f"{NAME}.weight_zero_point"] = (drawn.zeros - 128).to(torch.int8)
    raw = scheme(
        8, format="int-quantized", group={"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}
    )
    torch.testing.assert_close(read(raw, parts).dequantize(), drawn.numbers(), rtol=1e-6, atol=1e-6)


def test_one_scale_for_all() -> None:
    drawn = Drawn(8, True, group=IN)
    drawn.scale[:] = drawn.scale[0]
    parts = {f"{NAME}.weight": (drawn.values - 128).to(torch.int8), f"{NAME}.weight_scale": drawn.scale[0]}
    raw = scheme(8, format="int-quantized")
    torch.testing.assert_close(read(raw, parts).dequantize(), drawn.numbers(), rtol=1e-6, atol=1e-6)


def without(part: str) -> Callable[[Parts], None]:
    return lambda parts: parts.__delitem__(f"{NAME}.{part}")


def with_part(part: str, tensor: Tensor) -> Callable[[Parts], None]:
    return lambda parts: parts.__setitem__(f"{NAME}.{part}", tensor)


@pytest.mark.parametrize(
    ("raw", "pack", "change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, gptq, None, "quantized by bitsandbytes, which is none of awq, compressed-"),
        ({"quant_method": "fp8"}, gptq, None, "quantized by fp8"),
        ({}, gptq, None, "quantized by None"),
        (GPTQ | {"bits": 3}, gptq, None, "3 bits; 4 and 8 are read"),
        (GPTQ | {"bits": 2}, gptq, None, "2 bits"),
        (GPTQ | {"bits": "4"}, gptq, None, "4 bits; 4 and 8 are read"),
        (GPTQ | {"bits": 4.0}, gptq, None, r"4\.0 bits; 4 and 8 are read"),
        (GPTQ | {"checkpoint_format": "marlin"}, gptq, None, "lie as marlin"),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, gptq, None, r"dynamic settings differ for \+:\.\*up"),
        (GPTQ, gptq, with_part("g_idx", torch.arange(IN).int() % 2), "not grouped in their order .*g_idx; desc_act"),
        (GPTQ, gptq, without("scales"), "lacks .*scales"),
        (GPTQ, gptq, without("qzeros"), "lacks .*qzeros"),
        (GPTQ, gptq, with_part("qzeros", torch.full((2, 2), -1, dtype=torch.int32)), "wrapped around"),
        (GPTQ, gptq, with_part("scales", torch.ones(3, OUT)), "3 groups in rows of 64|instead of"),
        (GPTQ, gptq, with_part("scales", torch.ones(2, OUT + 1)), r"scales is of F32 \[2, 17\] instead of"),
        (GPTQ, lambda drawn: {"model.norm.weight": torch.ones(4)}, None, "no module has a qweight"),
        (GPTQ, gptq, with_part("scales", torch.full((2, OUT), torch.inf)), "scales are not finite"),
        (AWQ | {"bits": 3}, awq, None, "AWQ weights have 3 bits"),
        (AWQ | {"version": "gemv"}, awq, None, "lie as gemv"),
        (AWQ, awq, without("qzeros"), "lacks .*qzeros"),
        (AWQ, awq, with_part("qzeros", torch.zeros(3, 2).int()), "instead of"),
        (scheme(config_groups={}), compressed, None, "no config_groups"),
        (scheme(config_groups={"W4A16": ["Linear"]}), compressed, None, "W4A16 of its config_groups does not say"),
        (scheme(config_groups="W4A16"), compressed, None, "config_groups or sparsity_config .* is no object"),
        (scheme(sparsity_config=["dense"]), compressed, None, "config_groups or sparsity_config .* is no object"),
        (scheme(format="float-quantized"), compressed, None, "lie as float-quantized"),
        (scheme(format="marlin-24"), compressed, None, "lie as marlin-24"),
        (scheme(3), compressed, None, "of int3"),
        (scheme(group={"weights": {"num_bits": 8, "type": "float"}}), compressed, None, "of float8"),
        (scheme(group={"weights": {"num_bits": 8, "strategy": "block"}}), compressed, None, "scales are by block"),
        (
            scheme(group={"input_activations": {"num_bits": 8, "type": "int", "dynamic": False}}),
            compressed,
            None,
            "inp",
        ),
        (
            scheme(group={"input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}),
            compressed,
            None,
            "in",
        ),
        (scheme(group={"output_activations": {"num_bits": 8}}), compressed, None, "outputs are quantized"),
        (scheme(kv_cache_scheme={"num_bits": 8}), compressed, None, "kv_cache_scheme"),
        (scheme(transform_config={"R1": {}}), compressed, None, "rotated"),
        (scheme(sparsity_config={"format": "sparse-24-bitmask"}), compressed, None, "sparse"),
        (scheme(), compressed, without("weight_scale"), "lacks .*weight_scale"),
        (scheme(), compressed, without("weight_shape"), "lacks .*weight_shape"),
        (scheme(), compressed, without("weight_packed"), "no module is"),
        (scheme(), compressed, with_part("weight_shape", torch.tensor([OUT, 128])), "128, which is neither 4 nor 8"),
        (scheme(), compressed, with_part("weight_scale", torch.ones(OUT, 16)), "groups of 4 in rows of 64"),
        (scheme(), compressed, with_part("weight_scale", torch.ones(OUT, 3)), "3 groups in rows of 64"),
        (scheme(), compressed, with_part("weight_g_idx", torch.arange(IN) % 2), "not grouped in their order"),
        (scheme(), compressed, with_part("experts.packed", torch.zeros(2, 2, 8).int()), "holds all experts of a layer"),
        (scheme(), compressed, with_part("other.weight", torch.zeros(2, 8).int()), "is of I32, and its scales are"),
    ],
)
def test_what_is_not_read_is_named(
    raw: dict[str, Any], pack: Callable[[Drawn], Parts], change: Callable[[Parts], None] | None, message: str
) -> None:
    parts = pack(Drawn(4, False))
    if change is not None:
        change(parts)
    with pytest.raises(NotRead, match=message):
        read(raw, parts)


def test_groups_larger_than_kernels_add_up() -> None:
    parts = {f"{NAME}.weight": torch.zeros(1, 65544, dtype=torch.int8), f"{NAME}.weight_scale": torch.ones(1, 1)}
    with pytest.raises(NotRead, match="groups of 65544 in rows of 65544; .* a multiple of 8 up to 65536"):
        read(scheme(8, format="int-quantized"), parts)


# Whole models.


def quantized_model(
    folder: Path, plain: Path, raw: dict[str, Any], pack: Callable[[Drawn, str], Parts], keep: str = "none"
) -> dict[str, Tensor]:
    """Copy a model with random quantized linear layers, and return their dequantized weights by name."""
    shutil.copytree(plain, folder)
    tensors, numbers = load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name and tensors[name].ndim == 2 and keep not in name]:
        shape, symmetric = tuple(tensors.pop(name).shape), "experts.1." in name
        drawn = Drawn(int(raw.get("bits", 4)), symmetric, shape, 8)  # type: ignore[arg-type]
        drawn.scale /= 8
        numbers[name] = drawn.numbers()
        tensors |= pack(drawn, name.removesuffix(".weight"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": raw}))
    return numbers


def logits_of(target: Any) -> Tensor:
    tokens = torch.arange(20, 40)[None]
    parents = torch.arange(-1, 19)[None]
    actual: Tensor = target.forward(tokens, parents, target.new_cache(1, 20)).logits
    return actual


PACKS: dict[str, tuple[dict[str, Any], Callable[[Drawn, str], Parts]]] = {
    "gptq": (GPTQ, lambda drawn, name: gptq(drawn, 1, name)),
    "awq": (AWQ, awq),
    "compressed": (scheme(), compressed),
}


@pytest.mark.parametrize("layout", thinned(PACKS, keep=3))
def test_a_quantized_checkpoint_is_that_model(layout: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    raw, pack = PACKS[layout]
    numbers = quantized_model(tmp_path / "model", tiny_target_dir, raw, pack)
    target: Any = load_target(tmp_path / "model", device="cpu", compile="off")
    assert target.backend == "native" and "int4 weights" in target.running
    weights = dict(target.named_weights())
    assert all(torch.allclose(weights[name], number, atol=1e-6) for name, number in numbers.items())
    assert target.decoder.embedding.bits is None and target.source_fingerprint is None
    plain = load_target(tiny_target_dir, device="cpu", compile="off")
    state = {**dict(plain.named_weights()), **numbers}
    shutil.copytree(tiny_target_dir, tmp_path / "wide")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "wide" / "model.safetensors")
    expected = logits_of(load_target(tmp_path / "wide", device="cpu", compile="off"))
    assert (logits_of(target) - expected).std() < 0.1 * expected.std()  # inputs are rounded
    both: Any = load_target(tmp_path / "model", device="cpu", compile="off", quantize="int8")
    assert (both.decoder.bits, both.decoder.embedding.bits) == (4, 8)


@pytest.mark.parametrize(
    ("layout", "family"), [("gptq", "qwen3_next"), ("awq", "qwen3_moe"), ("compressed", "deepseek_v3")]
)
def test_experts_and_other_parts_are_read(layout: str, family: str, tmp_path: Path) -> None:
    raw, pack = PACKS[layout]
    raw, file = raw | {"dynamic": {"lm_head": {}, "-:.*shared_expert.*": {}}}, tmp_path / "plain" / "model.safetensors"
    write_model(family, tmp_path / "plain")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    numbers = quantized_model(tmp_path / "model", tmp_path / "plain", raw, pack, keep="shared_expert")
    save_file(tensors | numbers, file, metadata={"format": "pt"})
    expected, actual, compiled = (
        load_target(path, dtype="float32", device="cpu", backend="native", compile=way)
        for path, way in ((file.parent, "off"), (tmp_path / "model", "off"), (tmp_path / "model", "on"))  # type: ignore[arg-type]
    )
    for target in (actual, compiled):
        assert "int4 weights" in target.running
        for (name, weight), (_, right) in zip(target.named_weights(), expected.named_weights(), strict=True):
            torch.testing.assert_close(weight, right, rtol=0, atol=1e-6, msg=name)
    # Inputs are rounded, which may choose other experts.
    near = (logits_of(compiled) - logits_of(actual)).abs().mean(-1) / logits_of(actual).abs().mean()
    assert near.quantile(0.25) < 1e-4, near


def test_what_cannot_be_done_with_a_quantized_checkpoint(tiny_target_dir: Path, tmp_path: Path) -> None:
    raw, pack = PACKS["gptq"]
    quantized_model(tmp_path / "model", tiny_target_dir, raw, pack)
    with pytest.raises(ValueError, match="quantize is 'int4', and the checkpoint is quantized already .gptq.*int8"):
        load_target(tmp_path / "model", device="cpu", quantize="int4")
    with pytest.raises(ValueError, match="is quantized .gptq., and no adapter can be merged"):
        load_target(tmp_path / "model", device="cpu", adapter=tiny_target_dir)
    with pytest.raises(ValueError, match="does not quantize"):
        load_target(tmp_path / "model", device="cpu", backend="hf", quantize="int8")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["bits"] = 3
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="native backend cannot run .*: its GPTQ weights have 3 bits"):
        load_target(tmp_path / "model", device="cpu", backend="native")
    with pytest.raises(
        ValueError, match="GPTQ.* The other backend cannot run it, because its GPTQ weights have 3 bits"
    ):
        load_target(tmp_path / "model", device="cpu")


def test_parts_of_one_product_are_all_quantized_or_none(tiny_target_dir: Path, tmp_path: Path) -> None:
    raw, pack = PACKS["compressed"]
    quantized_model(tmp_path / "model", tiny_target_dir, raw, pack, keep="layers.1.self_attn.k_proj")
    with pytest.raises(ValueError, match=r"q_proj, .*v_proj are quantized and .*layers.1.self_attn.k_proj are not"):
        load_target(tmp_path / "model", device="cpu", backend="native", compile="off")
    target: Any = load_target(tmp_path / "model", device="cpu", compile="off", quantize="int8")
    assert [layer.qkv.bits for layer in target.decoder.layers] == [4, 8, 4]


def test_a_file_that_was_cut_short_is_named(tiny_target_dir: Path, tmp_path: Path) -> None:
    raw, pack = PACKS["awq"]
    quantized_model(tmp_path / "model", tiny_target_dir, raw, pack)
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="corrupt or cut short"):
        load_target(tmp_path / "model", device="cpu")
