from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies import copy_with
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft import Engine, load_drafter, load_target
from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.errors import UsageError
from blockdraft.formats import DrafterTarget, read_drafter
from blockdraft.targets import Target, embedding_and_head
from blockdraft.types import Drafting, SamplingParams
from blockdraft_tools.export import ExportFormat, export
from blockdraft_train.batches import PackedSequences
from blockdraft_train.complaints import Complaints
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.hidden_states import HiddenStateSettings, plan_hidden_states
from blockdraft_train.data.target_layers import target_hidden_states
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.devices import make_accelerator
from blockdraft_train.job import TrainingJob
from blockdraft_train.loss import term_weights
from blockdraft_train.objectives import Slots
from blockdraft_train.settings_files import read_settings
from blockdraft_train.trainer import run_folder, train
from blockdraft_train.variants.eagle3 import Eagle3Recipe, Eagle3Variant

KEPT = [3, 5, 6, 9, 10, 11, 30]


def made(target: Target, **fields: Any) -> tuple[Eagle3Variant, Eagle3Network]:
    variant = Eagle3Variant(Eagle3Recipe(**fields))
    return variant, variant.network(variant.config(target))


def slots_of() -> Slots:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 3, len(KEPT), generator=random)
    tokens = torch.tensor([[5, 3, 200, 11], [9, 9, 30, 6], [40, 41, 42, 43], [6, 10, 10, 3]])
    teacher = 4 * torch.randn(4, 3, len(KEPT), generator=random)
    taught = torch.ones(4, 3, dtype=torch.bool)
    return Slots(torch.zeros(4, 3, 32), logits, tokens, taught, teacher)


def test_losses_are_taken_over_the_draft_vocabulary(target: Target) -> None:
    variant, network = made(target, draft_vocab=len(KEPT), block_size=4, objective={"forward_kl": 0.7, "decay": 0.3})
    network.keep(torch.tensor(KEPT))
    slots = slots_of()
    assert slots.teacher_CKV is not None
    actual = variant.losses(network, slots)
    for block in range(4):
        for k in range(3):
            log_q = slots.logits_CKV[block, k].log_softmax(dim=-1)
            p, label = slots.teacher_CKV[block, k].softmax(dim=-1), int(slots.tokens_CL[block, k + 1])
            divergence = float((p * (p.log() - log_q)).sum()) if label in KEPT else 0.0
            surprise = -float(log_q[KEPT.index(label)]) if label in KEPT else 0.0
            assert float(actual["forward_kl"][block, k]) == pytest.approx(divergence, abs=1e-4)
            assert float(actual["decay"][block, k]) == pytest.approx(surprise, abs=1e-4)
    assert (actual["forward_kl"] > 0).sum() >= 6 and (actual["forward_kl"] == 0).any()
    weights = term_weights(variant, "forward_kl", slots.taught_CK)[0]
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.8, 0.64]), atol=1e-4, rtol=0)
    expected = [[token in KEPT for token in row[1:]] for row in slots.tokens_CL.tolist()]
    assert variant.counts(network, slots)["covered"].tolist() == expected
    best = slots.logits_CKV.argmax(dim=-1)
    assert variant.draft_tokens(network, slots).tolist() == [[KEPT[i] for i in row] for row in best.tolist()]


@pytest.mark.parametrize("objective", ["dpace", "block_verification"])
def test_a_token_outside_the_draft_vocabulary_does_not_count_for_later_slots(target: Target, objective: str) -> None:
    variant, network = made(target, draft_vocab=len(KEPT), block_size=4, objective={objective: 1.0})
    network.keep(torch.tensor(KEPT))
    slots = slots_of()
    known_CK = variant.counts(network, slots)["covered"]
    assert not known_CK[:, 0].all()
    passed_over = variant.losses(network, replace(slots, taught_CK=known_CK))[objective]
    assert torch.equal(variant.losses(network, slots)[objective], passed_over)


def test_the_draft_vocabulary_is_what_the_answers_say_most(target: Target, tmp_path: Path) -> None:
    """Prompts do not count. Of equally frequent tokens, lower ids win."""
    assert target.tokenizer is not None
    writer = DataWriter(tmp_path, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    answer = [50, 50, 50, 9, 9, 70, 60, 80]
    writer.add(0, [Document(torch.tensor([5] * 9 + answer), torch.arange(17) >= 9)])
    writer.finish()
    variant, network = made(target, draft_vocab=4)
    variant.fit_data(network, read_data(tmp_path))
    assert network.kept.tolist() == [9, 50, 60, 70]
    variant.fit_head(network, target)
    rows = embedding_and_head(target)[1][network.kept]
    assert torch.equal(network.lm_head.weight, rows) and network.lm_head.weight.requires_grad
    saved = variant.saved(network.state_dict())
    assert saved["d2t"].dtype == torch.int64 and saved["fc.weight"].dtype == torch.bfloat16


def test_shapes_and_target_layers(target: Target) -> None:
    recipe = Eagle3Recipe(heads=2, kv_heads=1, head_dim=16, intermediate_size=24, target_layers=(0, 2), block_size=5)
    config = Eagle3Variant(recipe).config(target)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 16)
    assert (config.intermediate_size, config.target_layers, config.block_size) == (24, (0, 2), 5)
    config = Eagle3Variant(Eagle3Recipe()).config(target)
    assert (config.target_layers, config.draft_vocab_size) == ((0, 1, 2), target.vocab_size)
    assert config.num_attention_heads == target.shape["num_attention_heads"]
    complaints = Complaints()
    assert not Eagle3Variant(Eagle3Recipe(draft_vocab=999)).defaults(target, None, complaints)
    assert "draft_vocab_size must be at most vocab_size, 265, got 999" in complaints.messages[0]


def test_usual_target_layers_of_a_target_with_enough_layers(target: Target) -> None:
    assert Eagle3Variant(Eagle3Recipe()).config(copy_with(target, num_layers=36)).target_layers == (1, 17, 32)


def test_training_with_a_part_of_the_vocabulary_equals_drafting(
    target: Target, parity: Callable[..., Any], tmp_path: Path
) -> None:
    variant, network = made(target, draft_vocab=120, target_layers=(2, 0), block_size=7, save_dtype="float32")
    network.keep(torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(3))[:120].sort().values)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    config = variant.config(target)
    export(tmp_path / "drafter", ExportFormat("eagle3"), config, variant.saved(network.state_dict()), target)
    parity(variant, network.eval(), load_drafter(tmp_path / "drafter", target=target), target)


def test_training_goes_on_from_a_drafter(target: Target, tiny_eagle3_dir: Path, tiny_drafter_dir: Path) -> None:
    variant, network = made(target, init=str(tiny_eagle3_dir), block_size=4)
    expected = read_drafter(tiny_eagle3_dir, None, 3)
    variant.fit_data(network, None)  # type: ignore[arg-type]
    variant.fit_head(network, target)
    assert all(torch.equal(tensor, expected.tensors[name]) for name, tensor in network.state_dict().items())
    assert network.config.block_size == 4 and network.config.target_layers == (0, 1)
    for fields, message in (
        ({"target_layers": (0, 2)}, r"target_layers of .* must be that of the recipe, \(0, 2\).*, got \(0, 1\)"),
        ({"draft_vocab": 7}, "draft_vocab of .* must be that of the recipe, 7.*, got 120"),
        ({"init": str(tiny_drafter_dir)}, "the drafter of .* must be an EAGLE-3 drafter.*, got 'DraftConfig'"),
    ):
        with pytest.raises(UsageError, match=message):
            made(target, **{"init": str(tiny_eagle3_dir), **fields})


def test_muon_leaves_the_head_alone(target: Target) -> None:
    variant, network = made(target)
    matrices = [name for name, parameter in network.named_parameters() if variant.is_matrix(name, parameter)]
    assert "lm_head.weight" not in matrices and {"fc.weight", "midlayer.self_attn.q_proj.weight"} <= {*matrices}


@pytest.fixture
def answers(target: Target, tmp_path: Path) -> Iterator[tuple[TokenData, list[Any], list[Any], list[Any]]]:
    """Data with the target's answers, and their prompts, parameters and completions."""
    assert target.tokenizer is not None
    prompts = [[5 + i, 9, 90 - i] for i in range(12)]
    params = [SamplingParams(20, 0.0 if i % 3 else 0.3, seed=i, ignore_eos=True) for i in range(12)]
    plain = Engine(target, load_drafter("none", target=target), max_batch_size=4).generate(prompts, params)
    writer = DataWriter(tmp_path / "data", {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for row, (prompt, one) in enumerate(zip(prompts, plain, strict=True)):
        ids = torch.tensor(prompt + one.token_ids)
        writer.add(row, [Document(ids, torch.arange(len(ids)) >= len(prompt) - 1)])
    writer.finish()
    yield read_data(tmp_path / "data"), prompts, params, plain


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_it_learns_the_targets_answers_and_decodes_them_losslessly(
    answers: tuple[TokenData, list[Any], list[Any], list[Any]], target: Target, tmp_path: Path
) -> None:
    """Trained from a folder of hidden states; decodes with chains, trees and sampled draft tokens."""
    data, prompts, params, plain = answers
    plan_hidden_states(
        tmp_path / "hidden_states", target, data, (0, 1, 2, 3), HiddenStateSettings(dtype="float32")
    ).write()
    flags = {"block-size": "5", "length": "40", "batch": "4", "anchors": "20", "held-out": "1", "steps": "150"}
    flags |= {
        "learning-rate": "2e-2",
        "draft-vocab": "100",
        "hidden_states": str(tmp_path / "hidden_states"),
        "trackers": "",
    }
    flags |= {"eval-every": "0", "eval-prompts": "1", "eval-tokens": "6", "save-every": "0"}
    recipe = read_settings(Eagle3Recipe, flags=flags)
    out = tmp_path / "drafter"
    accelerator = make_accelerator(recipe, run_folder(out), "cpu")
    lines = train(TrainingJob("eagle3", target, data, out, recipe, accelerator))
    assert sum(line["loss"] for line in lines[-5:]) < 0.5 * sum(line["loss"] for line in lines[:5])
    assert 0.5 < lines[-1]["covered"] <= 1 and len(lines[-1]["accuracy"]) == 4
    drafter = load_drafter(out, target=target)
    for drafting in (Drafting(None), Drafting(tree_budget=8)):
        actual = Engine(target, drafter, max_batch_size=5, drafting=drafting).generate(prompts, params)
        assert [one.token_ids for one in actual] == [one.token_ids for one in plain]
        tau = sum(one.tau for one in actual) / len(actual)
        assert tau > 1.6  # by chance a draft token among 100 tokens is right once in a hundred times


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 265, "max_position_embeddings": 256}


def of_family(folder: Path, family: str) -> Target:
    """Random target of a family that transformers knows, whose norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, tie_word_embeddings=False))
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1, 0.2)
    model.save_pretrained(folder)
    return load_target(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_drafter_begins_as_the_last_layer(family: str, tmp_path: Path) -> None:
    """It says behind each token what the target said there: the token itself, where the target wrote it."""
    target = of_family(tmp_path, family)
    variant, network = made(target, draft_vocab=100, block_size=2, init="last_layer")
    kept = torch.arange(100)
    network.keep(kept)
    variant.fit_head(network, target)
    tokens = torch.randint(0, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    target_layers = (*network.config.target_layers, target.num_layers)
    assert network.config.target_layers[-1] == target.num_layers - 2
    hidden_states = target_hidden_states(target, target_layers, [tokens[0]])[0][None].float()
    width = len(network.config.target_layers) * target.hidden_size
    anchors = torch.arange(1, 12)[None]
    blocks = torch.stack([anchors, anchors.roll(-1)], dim=2)
    documents = torch.zeros(1, 12, dtype=torch.int64)
    rows = PackedSequences(
        tokens, torch.arange(12)[None], documents, anchors, blocks, torch.ones(1, 11, 1, dtype=torch.bool)
    )
    states = variant.hidden(network, target, hidden_states[:, :, :width], rows)
    actual = variant.logits(network, target, states[0])[:, 0]
    teacher = hidden_states[0, :-1, width:]
    theirs = target.head(teacher.to(target.dtype)).float()[:, kept]
    torch.testing.assert_close(actual, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(variant.teacher_logits(target, teacher), theirs, atol=1e-4, rtol=1e-4)


def test_norms_of_target_layers_begin_at_their_scale(tmp_path: Path) -> None:
    """So the drafter still begins nearly as the last layer."""
    target = of_family(tmp_path, "llama")
    variant, network = made(target, draft_vocab=100, init="last_layer", fc_norm=True, norm_output=True)
    network.keep(torch.arange(100))
    variant.fit_head(network, target)
    layers = network.config.target_layers
    states = target_hidden_states(target, layers, [torch.randint(0, 100, (40,))])[0].float()
    fused = network.fuse(states)
    torch.testing.assert_close(fused.norm(dim=1).median(), states[:, -32:].norm(dim=1).median(), rtol=0.2, atol=0)
    assert torch.cosine_similarity(fused, states[:, -32:]).min() > 0.99
    assert network.config.norm_output and torch.equal(network.fed_on(fused), network.norm(fused))


def test_a_frozen_head_stays_that_of_the_target(target: Target) -> None:
    variant, network = made(target, draft_vocab=100, head="frozen")
    network.keep(torch.arange(100, 200))
    variant.fit_head(network, target)
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert network.config.tied_head
    assert torch.equal(network.lm_head.weight, embedding_and_head(target)[1][network.kept].float())


def test_a_head_that_has_learned_cannot_be_frozen(target: Target, tiny_eagle3_dir: Path) -> None:
    assert not made(target, init=str(tiny_eagle3_dir), block_size=4)[1].config.tied_head
    with pytest.raises(UsageError, match="head must be free, since that of .* has learned, got 'frozen'"):
        made(target, init=str(tiny_eagle3_dir), block_size=4, head="frozen")


@pytest.mark.parametrize(("family", "layout"), [("llama", None), ("qwen2", None), ("qwen3", "eagle3_speculators")])
def test_the_layout_of_a_drafter_that_begins_as_the_last_layer(family: str, layout: str | None, tmp_path: Path) -> None:
    """Norms on queries and keys alone need another layout than the usual one."""
    target = of_family(tmp_path / "target", family)
    variant, network = made(target, draft_vocab=100, init="last_layer")
    assert Eagle3Variant.layout(variant.recipe, target) == layout
    written, tensors = ExportFormat(layout or "eagle3", DrafterTarget("owner/name")), network.state_dict()
    export(tmp_path / "drafter", written, network.config, tensors, target, with_embedding=False)
    assert "embed_tokens.weight" not in load_file(tmp_path / "drafter/model.safetensors")
    assert load_drafter(tmp_path / "drafter", target=target).kind == "eagle3"


def test_a_narrower_mlp_begins_with_the_strongest_neurons(tmp_path: Path) -> None:
    target = of_family(tmp_path, "llama")
    whole, narrow = (made(target, init="last_layer", intermediate_size=size) for size in (None, 24))
    for variant, network in (whole, narrow):
        variant.fit_head(network, target)
    mlp, part = whole[1].midlayer.mlp, narrow[1].midlayer.mlp
    norms = mlp.gate_proj.weight.norm(dim=1) * mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    strongest = norms >= norms.sort().values[24]
    assert torch.equal(part.gate_proj.weight, mlp.gate_proj.weight[strongest])
    assert torch.equal(part.up_proj.weight, mlp.up_proj.weight[strongest])
    assert torch.equal(part.down_proj.weight, mlp.down_proj.weight[:, strongest])


def test_a_wider_mlp_computes_the_same_until_it_has_learned(tmp_path: Path) -> None:
    target = of_family(tmp_path / "target", "llama")
    variant, narrow = made(target, init="last_layer", intermediate_size=24, draft_vocab=100)
    narrow.keep(torch.arange(100))
    variant.fit_head(narrow, target)
    with torch.no_grad():
        narrow.midlayer.mlp.up_proj.weight.mul_(1.5)  # it has learned
    export(tmp_path / "drafter", ExportFormat("eagle3"), narrow.config, variant.saved(narrow.state_dict()), target)
    size = target.shape["intermediate_size"]
    variant, wide = made(target, init=str(tmp_path / "drafter"), intermediate_size=size)
    variant.fit_head(wide, target)
    x, mlp = torch.randn(5, target.hidden_size, generator=torch.Generator().manual_seed(0)), wide.midlayer.mlp
    torch.testing.assert_close(mlp(x), narrow.midlayer.mlp(x), atol=1e-4, rtol=1e-4)
    assert wide.config.intermediate_size == size > 24
    theirs = target.weights_in(".layers.3.mlp.gate_proj")["model.layers.3.mlp.gate_proj.weight"]
    # The file's weights are rounded, so its neurons are compared by distance: each of the target's occurs once.
    near = (mlp.gate_proj.weight[:, None] - theirs).abs().amax(dim=2) < 0.02 * theirs.abs().max()
    assert bool((near.sum(dim=0) == 1).all() and (near.sum(dim=1) == 1).all())
    assert not mlp.down_proj.weight[:, 24:].any()
    with pytest.raises(UsageError, match=f"intermediate_size must be at most the target's, {size}, to widen .*, got"):
        made(target, init=str(tmp_path / "drafter"), intermediate_size=size + 1)
    with pytest.raises(UsageError, match="intermediate_size of .* must be that of the recipe, 16"):
        made(target, init=str(tmp_path / "drafter"), intermediate_size=16)


def test_a_drafter_can_learn_to_read_normed_states(target: Target, tiny_eagle3_dir: Path) -> None:
    assert not made(target, init=str(tiny_eagle3_dir))[1].config.norm_output
    assert made(target, init=str(tiny_eagle3_dir), norm_output=True)[1].config.norm_output


def test_biases_of_the_last_layer_are_left_out(tmp_path: Path) -> None:
    target = of_family(tmp_path, "qwen2")
    variant, network = made(target, init="last_layer")
    variant.fit_head(network, target)
    assert not network.config.attention_bias
    assert torch.equal(
        network.midlayer.mlp.up_proj.weight,
        target.weights_in(".layers.3.mlp.up_proj")["model.layers.3.mlp.up_proj.weight"],
    )


def test_a_layer_of_another_kind_is_no_beginning(target: Target, tmp_path: Path) -> None:
    for fields, message in [
        ({"target_layers": (0, 2)}, "the last target layer must be .*got 2"),
        ({"heads": 2}, "heads must be the target's, 4, with --init last_layer.*, got 2"),
    ]:
        with pytest.raises(UsageError, match=message):
            made(target, init="last_layer", **fields)
    gemma = of_family(tmp_path, "gemma3_text")
    with pytest.raises(UsageError, match="the target's last layer must be of the kind of Llama's layers"):
        made(gemma, init="last_layer")
