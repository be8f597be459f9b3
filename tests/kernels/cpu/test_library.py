"""The C library refuses invalid calls without ending the process, and its structs match those of Python."""

import ctypes
import json
import multiprocessing
import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from blockdraft.drafters import load_drafter
from blockdraft.errors import UsageError
from blockdraft.kernels.cpu import library
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.compiled_decoder import CompiledDecoder, why_not
from blockdraft.kernels.cpu.compiled_runner import CompiledDraftRunner
from blockdraft.kernels.cpu.library import CallFields, LinearFields, ModelFields
from blockdraft.targets import decoder_config, load_target


class Damaged:
    """A library whose arguments are damaged before each call."""

    def __init__(self, real: Any, damage: Callable[..., None]) -> None:
        self._real, self._damage = real, damage

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._real, name)
        if name not in ("decoder_forward", "draft_context"):
            return function

        def damaged(model: ModelFields, call: CallFields, *more: Any) -> int:
            model = ModelFields.from_buffer_copy(model)
            self._damage(model, call)
            return int(function(model, call, *more))

        return damaged


def set_call(**values: object) -> Callable[..., None]:
    return lambda model, call: [setattr(call, name, value) for name, value in values.items()] and None


def set_model(**values: object) -> Callable[..., None]:
    return lambda model, call: [setattr(model, name, value) for name, value in values.items()] and None


def write(name: str, value: int, at: int = 0) -> Callable[..., None]:
    """Write a value into one of the arrays that a call points to."""

    def damage(model: ModelFields, call: CallFields) -> None:
        ctypes.c_int64.from_address(getattr(call, name) + 8 * at).value = value

    return damage


def set_layer(name: str, whole: object = None, **values: object) -> Callable[..., None]:
    """Set values of a field of the last layer, or the field itself."""

    def damage(model: ModelFields, call: CallFields) -> None:
        kept = library.LayerFields * model.num_layers
        layers = kept.from_buffer_copy(kept.from_address(ctypes.addressof(model.layers.contents)))
        model.layers, model.alive = layers, layers
        if not values:
            setattr(layers[-1], name, whole)
        for field, value in values.items():
            setattr(getattr(layers[-1], name), field, value)

    return damage


POINTER, SIZES, COUNTS, THREADS = "a pointer is null", "a size of the model", "fewer than 0 rows", "fewer threads"
KIND, CONVOLUTIONS = "a weight is of a kind", ("attention_conv", "mlp_conv")
LENGTHS, PARENTS, TARGET_LAYERS, LOGITS = (
    "a row begins before",
    "the parent of a node",
    "a target layer lies beyond",
    "logits are wanted",
)
BOTH = {
    **{f"no {name}": (set_call(**{name: None}), POINTER) for name in ("lengths", "starts", "store")},
    **{f"layers without {name}": (set_layer(name), POINTER) for name in ("before_attention", "before_mlp", "cos")},
    **{f"no weight of {name}": (set_layer(name, weight=None), POINTER) for name in library.PROJECTIONS},
    **{f"inputs of {name}": (set_layer(name, inputs=7), SIZES) for name in library.PROJECTIONS},
    **{f"outputs of {name}": (set_layer(name, outputs=7), SIZES) for name in library.PROJECTIONS},
    **{f"{name} 0": (set_model(**{name: 0}), SIZES) for name in ("num_layers", "hidden", "inner", "heads", "kv_heads")},
    **{f"{name} of -1 weights": (set_layer(name, taps=-1, groups=1, base=8), SIZES) for name in CONVOLUTIONS},
    **{f"{name} without end": (set_layer(name, taps=1 << 62, groups=1, base=8), SIZES) for name in CONVOLUTIONS},
    **{f"{name} of 0 groups": (set_layer(name, taps=1, groups=0, base=8), SIZES) for name in CONVOLUTIONS},
    **{f"{name} of uneven groups": (set_layer(name, taps=1, groups=5, base=8), SIZES) for name in CONVOLUTIONS},
    **{f"{name} without weights": (set_layer(name, taps=1, groups=1, base=None), POINTER) for name in CONVOLUTIONS},
    **{f"{name} uncorrected": (set_layer(name, taps=1, groups=1, base=8), POINTER) for name in CONVOLUTIONS},
    **{
        f"{name} quantized": (
            set_layer(name, taps=1, groups=1, base=8, projection=LinearFields(weight=8, kind=2)),
            KIND,
        )
        for name in CONVOLUTIONS
    },
    "heads that are in no group": (set_model(heads=3), SIZES),
    "heads of 3": (set_model(head_dim=3), SIZES),
    "no angles": (set_model(max_positions=0), SIZES),
    "no layers": (set_model(layers=ctypes.POINTER(library.LayerFields)()), POINTER),
    **{f"{name} -1": (set_call(**{name: -1}), COUNTS) for name in ("batch", "nodes", "slots")},
    "rows without end": (set_call(batch=1 << 40), COUNTS),
    "nodes without end": (set_call(nodes=1 << 31), COUNTS),
    "a negative length": (write("lengths", -3), LENGTHS),
    "one slot too few": (set_call(slots=15), LENGTHS),
    "a row before the store": (write("starts", -1), LENGTHS),
    "a row that ends behind the store": (write("starts", 9, at=1), LENGTHS),
    "a row without end": (write("starts", 2**63 - 1), LENGTHS),
    "a length without end": (write("lengths", 2**63 - 1), LENGTHS),
    "no workspace": (set_call(workspace=None), POINTER),
}
FORWARD = BOTH | {
    **{f"no {name}": (set_call(**{name: None}), POINTER) for name in ("parents", "tokens", "hidden_states", "logits")},
    "target layers that are nowhere": (set_call(target_layers=None), POINTER),
    "no embedding": (set_model(embedding=LinearFields()), POINTER),
    "no head": (set_model(head=LinearFields()), POINTER),
    "no norm": (set_model(norm=None), POINTER),
    "a node that hangs on itself": (write("parents", 1, at=1), PARENTS),
    "a node that hangs on a later one": (write("parents", 2, at=1), PARENTS),
    "a node of the row before": (write("parents", 2, at=4), PARENTS),
    "a parent of -2": (write("parents", -2), PARENTS),
    "a target layer of -1": (write("target_layers", -1), TARGET_LAYERS),
    "a target layer behind the last": (write("target_layers", 4, at=1), TARGET_LAYERS),
    "logits of some nodes, which?": (set_call(num_logits=5), LOGITS),
    "logits of more nodes than there are": (set_call(num_logits=7), LOGITS),
    "less than no logits": (set_call(num_logits=-1), LOGITS),
    "less than no target layers": (set_call(num_target_layer_ids=-1), TARGET_LAYERS),
    "logits of a node that is not there": (
        lambda model, call: [set_call(logits_at=call.tokens)(model, call), write("tokens", 6, at=5)(model, call)][0],
        LOGITS,
    ),
    "token 999": (write("tokens", 999, at=4), "UsageError: Token id 999 is none of the 265"),
    "token -1": (write("tokens", -1), "UsageError: Token id -1 is none of the 265"),
}
CONTEXT = BOTH | {
    "no features": (set_call(embedded=None), POINTER),
    "pairs": (set_model(pairs=1, token_norm=8, hidden_state_norm=8), SIZES),
    "pairs that are joined": (
        lambda model, call: set_model(
            pairs=1, token_norm=8, hidden_state_norm=8, joined=LinearFields(weight=8, inputs=64, outputs=32)
        )(model, call),
        SIZES,
    ),
    "earlier nodes": (set_call(done=1, slots=32), SIZES),
}
# For a network whose first layer reads pairs; each sequence has one earlier node.
ROWS = {
    **{f"no {name}": (set_call(**{name: None}), POINTER) for name in ("beside", "parents", "tokens", "store")},
    **{f"no {name}": (set_model(**{name: None}), POINTER) for name in ("token_norm", "hidden_state_norm")},
    "inputs of qkv": (set_layer("qkv", inputs=32), SIZES),
    "no pairs": (set_model(pairs=0), SIZES),
    "pairs that are joined": (set_model(joined=LinearFields(weight=8, inputs=64, outputs=32)), SIZES),
    "pairs that are joined to others": (set_model(joined=LinearFields(weight=8, inputs=64, outputs=31)), SIZES),
    "pairs in another kind": (set_model(joined=LinearFields(weight=8, inputs=64, outputs=32, kind=1)), KIND),
    "pairs that are convolved": (set_layer("attention_conv", taps=1, groups=1, base=8), SIZES),
    **{f"{name} -1": (set_call(**{name: -1}), COUNTS) for name in ("done", "hidden_slots")},
    "earlier nodes without end": (set_call(done=1 << 31), COUNTS),
    "more earlier nodes than slots": (set_call(done=9), LENGTHS),
    "a node that hangs on a later one": (write("parents", 2, at=1), PARENTS),
    "an earlier node that hangs on itself": (write("parents", 0), PARENTS),
    "a node of the second row that hangs on itself": (write("parents", 1, at=4), PARENTS),
    "a parent of -2": (write("parents", -2, at=5), PARENTS),
}
# For a mixture of 4 experts of size 16, of which each token uses 2, and a shared one of size 24.
MLPS = ("router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate")
MIXTURE = {
    **{f"{size} {name}": (set_model(experts=size), SIZES) for size, name in ((-1, "experts"), (0, "experts"))},
    **{f"experts: {size}": (set_model(experts=size), SIZES) for size in (3, 5, 1 << 31, 1 << 62)},
    **{f"chosen: {size}": (set_model(chosen=size), SIZES) for size in (-1, 0, 5, 1025, 1 << 62)},
    **{f"inner size: {size}": (set_model(expert_inner=size), SIZES) for size in (-16, 0, 2, 8, 32, 1 << 31, 1 << 62)},
    **{f"shared inner size: {size}": (set_model(shared_inner=size), SIZES) for size in (-1, 16, 32, 1 << 62)},
    **{f"rotated: {size}": (set_model(rotated=size), SIZES) for size in (-2, 3, 10)},
    **{f"no weight of {name}": (set_layer(name, weight=None), POINTER) for name in MLPS[1:-1]},
    "experts without a router": (set_layer("router", weight=None), SIZES),
    **{f"inputs of {name}": (set_layer(name, inputs=7), SIZES) for name in MLPS},
    **{f"outputs of {name}": (set_layer(name, outputs=7), SIZES) for name in MLPS},
    **{f"{name} quantized": (set_layer(name, kind=2), KIND) for name in MLPS},
    "a norm behind experts": (set_layer("after_mlp", 8), SIZES),
    "a router with a norm of its own": (set_layer("before_router", 8), SIZES),
    "values that are keys": (set_layer("values_are_keys", 1), SIZES),
    **{f"a layer with heads of {size}": (set_layer("head_dim", size), SIZES) for size in (-8, 3, 1024)},
    "experts that are convolved": (set_layer("mlp_conv", taps=1, groups=1, base=8), SIZES),
}


def outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except (AssertionError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def try_all(target_dir: Path, drafter_dir: Path, eagle_dir: Path, mixture_dir: Path, file: Path) -> None:
    """Write each case and its outcome to a file."""
    target: Any = load_target(target_dir, dtype="float32", device="cpu", backend="native", compile="on")
    drafter: Any = load_drafter(drafter_dir, target=target)
    decoder, run = target.compiled, drafter.runner
    assert isinstance(decoder, CompiledDecoder) and isinstance(run, CompiledDraftRunner)
    state, cache = run.new_state(2, 8), target.new_cache(2, 8)
    for rows in (state, cache):
        rows.commit([range(5)] * 2)

    def forward(decoder: CompiledDecoder = decoder) -> object:
        tokens, parents = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[-1, 0, 0]] * 2)
        return decoder.forward(tokens.clone(), parents, cache, (0, 3))

    mixture: Any = load_target(mixture_dir, dtype="float32", device="cpu", backend="native", compile="on")

    eagle: Any = load_drafter(eagle_dir, target=target)
    rows_run = eagle.runner
    texts = rows_run.new_state(2, 8)
    rows_run.observe(texts, torch.ones(2, 5, dtype=torch.int64), torch.zeros(2, 5, 64))
    texts.commit([range(5)] * 2)

    def next_rows() -> object:
        tokens, parents = torch.tensor([[1, 2], [4, 5]]), array("q", [-1, 0, 0] * 2)
        return rows_run.pass_of(texts, tokens, torch.zeros(2, 2, 32), parents, 1, 100)

    lines = file.open("w")
    for name, cases, user, work in (
        ("rows", ROWS, rows_run, next_rows),
        ("forward", FORWARD, decoder, forward),
        ("mixture", MIXTURE, mixture.compiled, lambda: forward(mixture.compiled)),
        ("context", CONTEXT, run, lambda: run.observe(state, torch.empty(0), torch.zeros(2, 3, 64))),
        ("pass", BOTH, run, lambda: run.draft_tokens(state, torch.zeros(2, 3, dtype=torch.int64), 1)),
    ):
        real = user.library
        work()
        for case, (damage, _) in cases.items():
            user.library = Damaged(real, damage)
            print(json.dumps([f"{name}: {case}", outcome(work)]), file=lines, flush=True)
        user.library = real
        print(json.dumps([f"{name}: nothing is wrong", outcome(work)]), file=lines, flush=True)


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Return the folder of a random mixture of experts with the shape of `tiny_target_dir`."""
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(tiny_target_dir, folder, dirs_exist_ok=True)
    config = Qwen2MoeConfig(
        vocab_size=265,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_what_cannot_be_computed_is_refused_and_the_process_lives(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tiny_eagle3_dir: Path, mixture_dir: Path, tmp_path: Path
) -> None:
    folders, file = (tiny_target_dir, tiny_drafter_dir, tiny_eagle3_dir, mixture_dir), tmp_path / "lines"
    process = multiprocessing.get_context("fork").Process(target=try_all, args=(*folders, file), daemon=True)
    process.start()
    process.join(300)
    actual = dict(json.loads(line) for line in file.read_text().splitlines())
    last = list(actual)[-1] if actual else "the first case"
    assert process.exitcode == 0, f"died behind {last!r}"
    groups = {"rows": ROWS, "forward": FORWARD, "mixture": MIXTURE, "context": CONTEXT, "pass": BOTH}
    for name, cases in groups.items():
        for case, (_, words) in cases.items():
            assert words in actual.pop(f"{name}: {case}"), (name, case)
        assert actual.pop(f"{name}: nothing is wrong") == "nothing"
    assert not actual


@pytest.mark.parametrize("name", ["gate", "shared_expert_gate"])
def test_experts_without_numbers_give_none(name: str, mixture_dir: Path, tmp_path: Path) -> None:
    """A router's or a gate's score that is NaN makes the whole token NaN, as in torch."""
    shutil.copytree(mixture_dir, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"model.layers.1.mlp.{name}.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for mode in ("on", "off"):
        target = load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile=mode)
        output = target.forward(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]), target.new_cache(1, 2), (0,))
        assert output.hidden_states is not None
        assert output.logits.isnan().all() and output.hidden_states.isfinite().all()


def test_mixtures_that_are_not_compiled() -> None:
    experts = {"num_experts": 2048, "num_experts_per_tok": 1024, "moe_intermediate_size": 16}
    for differences, reason in (
        ({}, None),
        ({"num_experts_per_tok": 1025}, "each token uses more than 1024 experts"),
        ({"moe_intermediate_size": 12}, "sizes of its experts are no multiples of 16"),
        ({"hidden_size": 40}, "sizes of its experts are no multiples of 16"),
    ):
        config = Qwen2MoeConfig(**{"hidden_size": 32, "num_attention_heads": 4, **experts, **differences})
        assert why_not(decoder_config(config), torch.float32, torch.device("cpu")) == reason


def test_of_experts_with_equal_scores_the_first_are_chosen(mixture_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(mixture_dir, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    outputs = []
    for name, factor in ((".mlp.gate.", 0.0), (".experts.2.", 2.0), (".experts.3.", 2.0), (".experts.1.", 2.0)):
        for key in weights:
            weights[key] *= factor if name in key else 1.0
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        target = load_target(tmp_path, dtype="float32", device="cpu", backend="native", compile="on")
        outputs.append(target.forward(torch.tensor([[1]]), torch.tensor([[-1]]), target.new_cache(1, 1)).logits)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def made() -> Any:
    actual = build(torch.float32, torch.float32, 8).library()
    assert actual is not None
    return actual


def test_a_product_is_checked_too() -> None:
    weight = torch.zeros(2, 5, made().lanes)
    fields, x, y = LinearFields(weight=weight.data_ptr(), inputs=5, outputs=9), torch.ones(3, 5), torch.zeros(3, 9)

    def multiply(fields: LinearFields | None, x: torch.Tensor | None, stride: int, rows: int) -> str:
        at = None if x is None else x.data_ptr()
        arguments = None if fields is None else ctypes.byref(fields), at, stride, rows, y.data_ptr(), None
        return outcome(lambda: made().checked(made().packed_linear(*arguments)))

    assert multiply(fields, x, 5, 3) == multiply(fields, x, 5, 0) == multiply(fields, None, 5, 0) == "nothing"
    assert POINTER in multiply(None, x, 5, 3)
    assert POINTER in multiply(LinearFields(inputs=5, outputs=9), x, 5, 3)
    assert POINTER in multiply(fields, None, 5, 3)
    assert SIZES in multiply(LinearFields(weight=weight.data_ptr(), inputs=-5, outputs=9), x, 5, 3)
    assert COUNTS in multiply(fields, x, 5, -1) and COUNTS in multiply(fields, x, -5, 3)


def test_weights_quantized_are_checked() -> None:
    """With a library that has integer kernels, and one without."""
    few = build(torch.float32, torch.float32, 8, True).library()
    assert few is not None and few.has_integers and not made().has_integers
    codes, scale = torch.zeros(2, 8, 8, 4, dtype=torch.uint8), torch.zeros(2, 2, 8)
    x, y = torch.ones(3, 32), torch.zeros(3, 9)

    def multiply(
        kernels: library.Library, kind: int, group: int, scales: int | None = scale.data_ptr(), **more: Any
    ) -> str:
        sizes = {"inputs": 16, "outputs": 9, "kind": kind, "group": group} | more
        fields = LinearFields(weight=codes.data_ptr(), scale=scales, **sizes)
        at = x.data_ptr(), 32, 3, y.data_ptr(), None
        return outcome(lambda: kernels.checked(kernels.packed_linear(ctypes.byref(fields), *at)))

    assert multiply(few, 2, 16) == multiply(few, 3, 8) == "nothing"
    for kernels, kind, group in ((made(), 2, 16), (few, 1, 16), (few, 4, 16), (few, -1, 16)):
        assert "of a kind that this library was not built for" in multiply(kernels, kind, group)
    assert "has no scale" in multiply(few, 2, 16, None)
    assert multiply(few, 2, 16, scale_kind=4, offset=scale.data_ptr(), offset_kind=4) == "nothing"
    for factors in ({"scale_kind": 1}, {"offset": scale.data_ptr(), "offset_kind": 2}):
        assert "or its scales or offsets are" in multiply(few, 2, 16, **factors)
    nested = {"inputs": 32, "scale_kind": 2, "scale_unit": scale.data_ptr(), "span": 2}
    assert multiply(few, 3, 16, **nested) == multiply(few, 6, 16, **nested) == "nothing"
    assert "of a kind" in multiply(few, 2, 16, **nested)
    for wrong in ({"span": 0}, {"scale_unit": None}):
        assert "or its scales or offsets are" in multiply(few, 6, 16, **(nested | wrong)), wrong
    for wrong in ({"span": 1}, {"span": -2}, {"span": 4}, {"span": 32}, {"group": 8}):
        assert "groups of a weight" in multiply(few, 6, wrong.pop("group", 16), **(nested | wrong)), wrong
    for group in (0, 4, 12, 32, -8, 1 << 20):
        assert "groups of a weight" in multiply(few, 3, group), group


@pytest.mark.parametrize("struct", library.STRUCTS)
def test_structs_must_be_those_of_c(struct: str) -> None:
    fields: list[tuple[str, Any]] = [*library.STRUCTS[struct]._fields_]  # type: ignore[misc]
    first, *others = fields
    library.check_structs(made().handle)
    for changed, place in (
        ([("another", first[1]), *others], "another"),
        ([others[0], first, *others[1:]], others[0][0]),
        ([(first[0], ctypes.c_int64 * 33), *others], first[0]),
        ([*fields, ("another", ctypes.c_int64)], "another"),
        (fields[:-1], ""),
    ):
        odd = type("Odd", (ctypes.Structure,), {"_fields_": changed})
        with pytest.raises(AssertionError, match=rf"struct {struct}: .*\('{place}', .* in Python"):
            library.check_structs(made().handle, {**library.STRUCTS, struct: odd})
