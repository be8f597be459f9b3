"""MTP heads in the target's folder: draft tokens compared with transformers' layers run over whole texts, and refused
folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from thinned import thinned
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.decode.proposal import Plan, Proposal
from blockdraft.drafters import load_drafter
from blockdraft.drafters.mtp.drafter import FAMILIES, MTPDrafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

LAYERS = 2
PROMPT = [7, 50, 33, 12, 9, 21]
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "v_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GROUPED = EXPERTS | {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
QWEN = {"head_dim": 8, "layer_types": ["full_attention"] * (LAYERS + 1), "num_experts": 4}
QWEN |= EXPERTS | {"shared_expert_intermediate_size": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT | GROUPED,
    "glm4_moe": GROUPED | {"head_dim": 8, "use_qk_norm": True},
    "glm4_moe_lite": LATENT | GROUPED | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "qwen3_next": QWEN,
    "qwen3_5_text": {key: QWEN[key] for key in ("head_dim", "layer_types")},
    "qwen3_5_moe_text": QWEN,
}
AROUND = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}


class Published(NamedTuple):
    """Folder of a model as it is published, and the model that it was made of, whose last layer is the head's."""

    folder: Path
    whole: Any
    around: dict[str, Tensor]


@pytest.fixture(scope="module")
def publish(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    made: dict[str, Published] = {}

    def find(family: str) -> Published:
        if family not in made:
            made[family] = make(family, tmp_path_factory.mktemp(family) / "target")
        return made[family]

    return find


def make(family: str, folder: Path) -> Published:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **BASE | {"num_hidden_layers": LAYERS + 1} | SHAPES[family])
        whole: Any = AutoModelForCausalLM.from_config(config).eval()
        for name, weight in [*whole.named_parameters(), *whole.named_buffers()]:
            if "norm" in name or "bias" in name:  # as made they are all alike, and hide which is used where
                weight.data += 0.5 * torch.rand_like(weight)
        centre = 0 if family.startswith("qwen") else 1
        around = {own: centre + 0.5 * torch.rand(32) for own in AROUND} | {"eh_proj": 0.2 * torch.randn(32, 64)}
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    named = {head_name(family, name): one for name, one in tensors.items()}
    named |= {head_name(family, f"model.layers.{LAYERS}.{own}.weight"): one for own, one in around.items()}
    if not family.startswith("qwen"):
        named[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        named[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    write_shards(folder, named)
    change(folder, num_hidden_layers=LAYERS)
    for key in {"layer_types", "mlp_layer_types"} & set(SHAPES[family]):
        change(folder, **{key: SHAPES[family][key][:LAYERS]})
    return Published(folder, whole, around)


def head_name(family: str, name: str) -> str:
    own = name.removeprefix(f"model.layers.{LAYERS}.")
    if own == name or not family.startswith("qwen"):
        return name
    around = AROUND.get(own.removesuffix(".weight"))
    return f"mtp.{around}.weight" if around else f"mtp.layers.0.{own}"


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save tensors in three files, those of the head in more than one."""
    index = {name: f"model-{place % 3}.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in {*index.values()}:
        save_file({name: tensors[name] for name in index if index[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def change(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


class Watched(MTPDrafter):
    """Records proposals, the number of tokens before each, and the logits of each step."""

    def __init__(self, drafter: MTPDrafter, target: Target) -> None:
        super().__init__(drafter.network, target)
        self.seen: list[tuple[int, Proposal, Tensor]] = []
        self._logits: list[Tensor] = []
        logits = self.network.logits

        def kept(hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
            self._logits.append(logits(hidden, head))
            return self._logits[-1]

        vars(self.network)["logits"] = kept

    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        [length] = state.lengths
        self._logits = []
        proposal = super().propose(state, anchor, plan)
        self.seen.append((length, proposal, torch.cat(self._logits, dim=1)[0]))
        return proposal


@torch.no_grad()
def expected(published: Published, text: list[int], count: int) -> Tensor:
    """Logits of `count` draft tokens after a text, from uncached runs of the head's layer over the whole text."""
    target: Any = AutoModelForCausalLM.from_pretrained(published.folder).eval()
    whole, around = published.whole, published.around

    def norm(own: str, x: Tensor) -> Tensor:
        made = type(whole.model.norm)(32, eps=whole.config.rms_norm_eps)
        made.weight.data = around[own]
        return made(x)

    states = target.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    actual = []
    for _ in range(count):
        embedded = whole.model.embed_tokens(torch.tensor(text[1:]))
        rows = (torch.cat([norm("enorm", embedded), norm("hnorm", states)], dim=-1) @ around["eh_proj"].T)[None]
        positions = torch.arange(rows.size(1))[None]
        seen = torch.ones(rows.size(1), rows.size(1)).tril().log()[None, None]  # 0 or -inf
        rotary = whole.model.rotary_emb
        places = positions.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else positions
        out = whole.model.layers[LAYERS](
            rows,
            attention_mask=seen,
            position_ids=positions,
            position_embeddings=rotary(rows, places),
        )
        normed = norm("shared_head.norm", out[0, -1])
        actual.append(whole.lm_head(normed))
        text = [*text, int(actual[-1].argmax())]
        states = torch.cat([states, normed[None]])
    return torch.stack(actual)


def test_every_family_is_tested() -> None:
    assert {*SHAPES} == {*FAMILIES}


@pytest.mark.parametrize("family", thinned(SHAPES, keep=2))
def test_logits_are_those_of_the_layer_over_the_whole_text(family: str, publish: Callable[[str], Published]) -> None:
    published = publish(family)
    target = load_target(published.folder, backend="hf")
    loaded = load_drafter("mtp", target=target)
    assert isinstance(loaded, MTPDrafter)
    watched = Watched(loaded, target)
    [answer] = Engine(target, watched, drafting=Drafting(5)).generate([PROMPT], SamplingParams(9, ignore_eos=True))
    text = PROMPT + answer.token_ids
    for length, proposal, logits in [watched.seen[0], watched.seen[-2]]:
        wanted = expected(published, text[: length + 1], len(logits))
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        assert proposal.tokens[0, 1:].tolist() == wanted.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("family", "drafting"),
    [
        ("deepseek_v3", Drafting(tree_budget=12)),
        pytest.param("glm4_moe", Drafting(None), marks=pytest.mark.slow),
        pytest.param("qwen3_next", Drafting(tree_budget=12), marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_plain_decoding(
    family: str, drafting: Drafting, publish: Callable[[str], Published]
) -> None:
    target = load_target(publish(family).folder, backend="hf")
    prompts = [PROMPT, [5], [(7 * i * i) % 50 + 4 for i in range(17)]]
    params = [SamplingParams(11, temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.0, 0.8)]
    plain = Engine(target, load_drafter("none", target=target)).generate(prompts, params)
    drafted = Engine(target, load_drafter("mtp", target=target), 2, drafting).generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(sum(one.stats.drafted) > 0 for one in drafted)


def test_dtypes_of_a_head_in_bfloat16(publish: Callable[[str], Published]) -> None:
    """With weights of 16 bits, the router's bias and the rotary angles stay in 32."""
    target = load_target(publish("deepseek_v3").folder, dtype="bfloat16", backend="hf")
    drafter = load_drafter("mtp", target=target)
    assert isinstance(drafter, MTPDrafter)
    kinds = {name: one.dtype for name, one in drafter.network.state_dict().items() if one.dtype != torch.bfloat16}
    assert kinds == {"layers.0.mlp.gate.e_score_correction_bias": torch.float32}


def test_a_dense_layer_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "qwen3_next", QWEN | {"mlp_only_layers": [LAYERS]})
    folder = make("qwen3_next", tmp_path / "target").folder
    change(folder, mlp_only_layers=[])
    drafter = load_drafter("mtp", target=load_target(folder, backend="hf"))
    assert isinstance(drafter, MTPDrafter)
    assert "layers.0.mlp.gate_proj.weight" in drafter.network.state_dict()


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_head_in_the_speculators_format_is_the_same(
    family: str, tmp_path: Path, publish: Callable[[str], Published]
) -> None:
    """speculators saves a head that it took from the target's folder and trained further."""
    published = publish(family)
    target = load_target(published.folder, backend="hf")
    own = load_drafter("mtp", target=target)
    assert isinstance(own, MTPDrafter)
    names = {"pre_fc_norm_embedding": "token_layernorm", "pre_fc_norm_hidden": "hidden_layernorm"}
    names |= {"fc": "input_proj", "norm": "final_layernorm"}
    tensors = {}
    for name, tensor in own.network.state_dict().items():
        module = name.removesuffix(".weight")
        tensors[f"mtp_layers.0.{names[module]}.weight" if module in names else f"mtp_{name}"] = tensor
    raw = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads((published.folder / "config.json").read_text()),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    actual = load_drafter(tmp_path, target=target)
    assert isinstance(actual, MTPDrafter) and (actual.block_size, own.block_size) == (4, 8)
    read = actual.network.state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in own.network.state_dict().items())
    params = SamplingParams(9, ignore_eos=True)
    answers = [Engine(target, one, drafting=Drafting(4)).generate([PROMPT], params)[0] for one in (own, actual)]
    assert answers[0].stats.committed == answers[1].stats.committed


def remake(published: Published, folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> Target:
    """Target in a copy of the folder with edited tensors."""
    shutil.copytree(published.folder, folder)
    tensors = {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}
    edit(tensors)
    write_shards(folder, tensors)
    return load_target(folder, backend="hf")


DOWN = "mtp.layers.0.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("mtp.fc.weight"), r"mtp.fc.weight: expected \(32, 64\), found None"),
        (lambda tensors: tensors.pop(DOWN), r"experts.2.down_proj.weight: expected \(32, 16\), found None"),
        (lambda tensors: tensors.update({DOWN: torch.ones(16, 32)}), r"expected \(32, 16\), found \(16, 32\)"),
        (lambda tensors: tensors.update({"mtp.gru.weight": torch.ones(3)}), r"mtp.gru.weight: expected None"),
        (lambda tensors: tensors.update({"mtp.layers.1.x": torch.ones(3)}), "several MTP layers"),
        (lambda tensors: tensors.update({DOWN: torch.ones(32, 16).to(torch.float8_e4m3fn)}), "is of type F8_E4M3"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path, publish: Callable[[str], Published]
) -> None:
    target = remake(publish("qwen3_next"), tmp_path / "target", edit)
    with pytest.raises(UsageError, match=message):
        load_drafter("mtp", target=target)


def test_a_model_that_was_saved_without_its_head_is_refused(
    tmp_path: Path, publish: Callable[[str], Published]
) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    target = remake(publish("deepseek_v3"), tmp_path / "target", drop)
    with pytest.raises(UsageError, match=r"has no MTP head: .*model.layers.2.*as it was published; or use another"):
        load_drafter("mtp", target=target)


def test_families_without_a_known_head_are_refused(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    with pytest.raises(UsageError, match="is of the family qwen3, whose MTP heads are not supported; .*deepseek_v3"):
        load_drafter("mtp", target=target)
    target.path = None
    with pytest.raises(UsageError, match="the target is no folder with a config.json; .*hf download NAME"):
        load_drafter("mtp", target=target)


def test_only_files_with_parts_of_the_head_are_opened(tmp_path: Path, publish: Callable[[str], Published]) -> None:
    target = remake(publish("qwen3_next"), tmp_path / "target", lambda tensors: None)
    folder, index = tmp_path / "target", tmp_path / "target" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    for name in listed["weight_map"]:
        if not name.startswith("mtp."):
            listed["weight_map"][name] = "not-here.safetensors"
    index.write_text(json.dumps(listed))
    assert load_drafter("mtp", target=target).path is None  # it has no folder of its own
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UsageError, match="model-1.safetensors cannot be read"):
        load_drafter("mtp", target=target)
