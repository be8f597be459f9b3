"""vllm-project/speculators as outside judge: it loads what we export, computes what our drafter computes, and writes
what we read."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, read_drafter, speculators, zlab
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.nn.torch_runner import CachedAttention
from blockdraft.targets import Target, embedding_and_head, load_target
from blockdraft.types import SamplingParams
from blockdraft_tools.export import ExportFormat, convert, export

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    peer = pytest.importorskip("speculators", reason="needs the extra `peers`")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

CONTEXT, ANCHOR = 20, 7
ARCHITECTURES = ("Qwen3ForCausalLM",)


def named(target: Path) -> DrafterTarget:
    return DrafterTarget(str(target), ARCHITECTURES)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


def theirs(folder: Path) -> Any:
    config = peer.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = peer.SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        assert not tensor.is_floating_point() or not tensor.isnan().any(), name  # they begin as NaN
    return model


def compare(folder: Path, target: Target, head_less_slots: int) -> None:
    """The same hidden states and logits at one anchor, in their training pass and in our draft pass."""
    model, drafter = theirs(folder), load_drafter(folder, target=target)
    network = drafter.network  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, CONTEXT, len(drafter.target_layers) * target.hidden_size, generator=generator)
    tokens = torch.randint(4, target.vocab_size, (1, CONTEXT), generator=generator)
    alone = torch.zeros(1, CONTEXT)
    alone[0, ANCHOR] = 1
    with torch.no_grad():
        last = torch.zeros(1, CONTEXT, target.hidden_size)
        documents = torch.zeros(1, CONTEXT, dtype=torch.long)
        hidden, logits, *_ = model._backbone_forward(hidden_states, tokens, alone, last, documents, max_anchors=1)
        state = drafter.new_state(1, CONTEXT)
        drafter.observe(state, tokens[:, :ANCHOR], hidden_states[:, :ANCHOR], [ANCHOR])
        block = torch.full((1, network.config.block_size), network.config.mask_token_id)
        block[0, 0] = tokens[0, ANCHOR]
        our_hidden, our_logits = drafter.draft_pass(state, block)  # type: ignore[attr-defined]
        kept = model.t2d if model.t2d is not None else torch.ones(target.vocab_size, dtype=torch.bool)
        assert our_logits[..., ~kept].isneginf().all()
        assert_close(hidden[:, head_less_slots:], our_hidden[:, head_less_slots:])
        assert_close(logits[:, head_less_slots:], our_logits[:, head_less_slots:, kept])
        if getattr(model, "markov_head", None) is not None:
            before = tokens[:, ANCHOR : ANCHOR + block.size(1)]
            bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
            assert_close(bias, network.bias(network.previous(before))[..., kept])
            inputs = torch.cat([hidden, model.markov_head.prev_embeddings(before)], dim=-1)
            ours = network.confidence_logits(our_hidden, network.previous(before))
            assert_close(model.confidence_head(inputs), ours)


def assert_close(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layers",
    [
        [(False, None), (False, None)],
        [(True, 99), (False, None)],
        [(False, 99), (False, None)],
        [(True, 99), (True, 99)],
    ],
)
def test_dflash(
    tmp_path: Path, target: Target, tiny_target_dir: Path, tiny_drafter_dir: Path, layers: list[tuple[bool, int | None]]
) -> None:
    config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
    config = replace(config, layers=tuple(LayerAttention(*layer) for layer in layers))
    zlab.write_checkpoint(tmp_path / "draft", config, tensors)
    convert(
        tmp_path / "draft",
        tmp_path / "out",
        ExportFormat("speculators", named(tiny_target_dir)),
        target,
    )
    compare(tmp_path / "out", target, head_less_slots=1)


def test_dspark(tmp_path: Path, target: Target, tiny_target_dir: Path, tiny_dspark_dir: Path) -> None:
    convert(
        tiny_dspark_dir,
        tmp_path / "out",
        ExportFormat("speculators", named(tiny_target_dir)),
        target,
    )
    compare(tmp_path / "out", target, head_less_slots=0)


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_dspark_dir"])
def test_reduced_vocabulary(
    tmp_path: Path, target: Target, tiny_target_dir: Path, name: str, request: pytest.FixtureRequest
) -> None:
    config, tensors = zlab.read_checkpoint(request.getfixturevalue(name))
    embedding, head = embedding_and_head(target)
    kept = torch.arange(1, target.vocab_size, 3)
    own = Borrowed(embedding, head[kept], kept)
    speculators.LAYOUT.write(tmp_path / "out", Checkpoint(config, tensors, own), named(tiny_target_dir))
    compare(tmp_path / "out", target, head_less_slots=0 if "dspark" in name else 1)


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_dspark_dir"])
def test_we_read_what_they_write(
    tmp_path: Path, target: Target, tiny_target_dir: Path, name: str, request: pytest.FixtureRequest
) -> None:
    config, tensors = zlab.read_checkpoint(request.getfixturevalue(name))
    source = request.getfixturevalue(name)
    convert(
        source,
        tmp_path / "out",
        ExportFormat("speculators", named(tiny_target_dir)),
        target,
    )
    theirs(tmp_path / "out").save_pretrained(tmp_path / "again")
    found = read_drafter(tmp_path / "again", None, target.num_layers)
    assert found.config == config and found.borrowed is not None and found.borrowed.kept is None
    assert all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    assert type(load_drafter(tmp_path / "again", target=target)) is type(load_drafter(source, target=target))


@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"qk_norm": True, "draft_vocab_size": 265}]
)
def test_eagle3(tmp_path: Path, target: Target, tiny_target_dir: Path, flags: dict[str, Any]) -> None:
    """The drafts that they make in their unrolled training are those that ours makes in drafting; and back."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_target_layers": target.num_layers}
    sizes |= {"hidden_size": target.hidden_size, "intermediate_size": 48, "vocab_size": target.vocab_size}
    config = Eagle3Config(**{**sizes, "draft_vocab_size": 60, "target_layers": (1, 0), "rope_theta": 5e4, **flags})
    torch.manual_seed(7)
    network = Eagle3Network(config)
    network.keep(torch.randperm(target.vocab_size)[: config.draft_vocab_size].sort().values)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    written = ExportFormat("eagle3_speculators", named(tiny_target_dir))
    export(tmp_path / "ours", written, config, network.state_dict(), target)
    model, drafter = theirs(tmp_path / "ours"), load_drafter(tmp_path / "ours", target=target)
    seen = set()
    for anchor in range(1, CONTEXT - 7):
        hidden_states = torch.randn(1, CONTEXT, 2 * target.hidden_size)
        tokens = torch.randint(4, target.vocab_size, (1, CONTEXT + 1))
        state = drafter.new_state(1, CONTEXT)
        drafter.observe(state, tokens[:, :anchor], hidden_states[:, :anchor], [anchor])
        proposal = drafter.propose(state, tokens[:, anchor], ChainPlan(8, [SamplingParams()]))
        tokens[:, anchor : anchor + 8] = proposal.tokens  # their steps get the tokens of the text
        with torch.no_grad():
            found = model(hidden_states, tokens[:, 1:], torch.zeros(1, CONTEXT, dtype=torch.long), ttt_steps=7)
        draft_tokens = network.kept[torch.stack([step[0, anchor - 1] for step in found])].tolist()
        assert proposal.tokens[0, 1:].tolist() == draft_tokens
        seen |= {*draft_tokens}
    assert len(seen) > 5
    model.save_pretrained(tmp_path / "again")
    again = read_drafter(tmp_path / "again", None, target.num_layers)
    assert again.config == config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in network.state_dict().items())


def first_draft_tokens(drafter: Any, target: Target, tokens: Tensor, hidden_states: Tensor) -> Tensor:
    """Logits of the first draft token behind every token of a text but the first."""
    count = tokens.size(1) - 1
    alone = CachedAttention(lambda layer, *nodes: nodes, [torch.ones(1, count, count).tril().bool()])
    states = drafter.network(target.embed(tokens[:, 1:]), torch.arange(count)[None], alone, hidden_states[:, :-1])
    logits: Tensor = drafter.network.logits(states, target.head)
    return logits


def compare_mtp(folder: Path, target: Target) -> None:
    tokens = torch.randint(4, target.vocab_size, (1, CONTEXT))
    hidden_states = torch.randn(1, CONTEXT, target.hidden_size)
    model = theirs(folder)
    with torch.no_grad():
        [first, *_], _, _ = model(tokens, hidden_states)
        ours = first_draft_tokens(load_drafter(folder, target=target), target, tokens, hidden_states)
    assert_close(first, ours[:, : first.size(1)])


def test_mtp(tmp_path: Path, target: Target, tiny_target_dir: Path, tiny_mtp_dir: Path) -> None:
    written = ExportFormat("mtp_speculators", named(tiny_target_dir))
    convert(tiny_mtp_dir, tmp_path / "ours", written, target)
    compare_mtp(tmp_path / "ours", target)
    theirs(tmp_path / "ours").save_pretrained(tmp_path / "again")
    ours, again = (read_drafter(folder, None, target.num_layers) for folder in (tiny_mtp_dir, tmp_path / "again"))
    assert again.config == ours.config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in ours.tensors.items())


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_mtp_of_published_models(family: str, tmp_path: Path) -> None:
    """Heads of their shapes, which they write and we read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    layers = AutoConfig.for_model(
        family, **sizes, **(experts if "next" in family else {}), layer_types=["full_attention"] * 2
    )
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(layers).save_pretrained(tmp_path / "target")
    greedy = {"algorithm": "mtp", "default_proposal_method": "greedy"}
    greedy |= {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    greedy |= {"verifier": {"name_or_path": str(tmp_path / "target"), "architectures": layers.architectures or ["x"]}}
    raw = {"speculators_model_type": "mtp", "speculators_config": greedy, "transformer_layer_config": layers.to_dict()}
    model = peer.SpeculatorModel.registry["mtp"](peer.SpeculatorModelConfig.from_dict(raw))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "head")
    compare_mtp(tmp_path / "head", load_target(tmp_path / "target", backend="hf"))
