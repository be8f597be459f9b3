"""Draft tokens of an MTP head, compared with its formula in plain loops over the files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockdraft.decode.proposal import ChainPlan, Plan, Proposal, TreePlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.mtp.drafter import MTPDrafter
from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.engine import Engine
from blockdraft.formats import read_drafter
from blockdraft.nn.cache import KVCache
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPT = [7, 60, 33, 12, 9, 21]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """`tiny_target_dir` with uneven weights in its last norm. The head norms its input once more, so even weights would
    hide whether a state is taken before or after the target's norm."""
    folder = tmp_path_factory.mktemp("uneven") / "target"
    shutil.copytree(tiny_target_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = 0.2 + 2 * torch.rand(32, generator=torch.Generator().manual_seed(7))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["compiled", "uncompiled"])
def target(target_dir: Path, request: pytest.FixtureRequest) -> Target:
    return load_target(target_dir, backend="native", compile="on" if request.param == "compiled" else "off")


@pytest.fixture(scope="module")
def twin(target_dir: Path, tiny_mtp_dir: Path) -> "Twin":
    return Twin(target_dir, tiny_mtp_dir)


class Twin:
    """Readable twin of the head: one text, no cache, from the files alone."""

    def __init__(self, target: Path, head: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        self._tensors = {name.removeprefix("mtp."): one for name, one in load_file(head / "model.safetensors").items()}
        self._config = json.loads((head / "config.json").read_text())

    @torch.no_grad()
    def __call__(self, text: list[int], count: int, normed_feedback: bool = True) -> list[int]:
        """Draft tokens behind the last token of a text, which is the anchor."""
        ids = torch.tensor([text[:-1]])
        states = list(self.model.model(ids).last_hidden_state[0])  # of the tokens before each pair's own
        text, draft_tokens = list(text), list[int]()
        for _ in range(count):
            pairs = [self._pair(token, state) for token, state in zip(text[1:], states, strict=True)]
            out = self._layer(torch.stack(pairs))[-1]
            normed = self._norm("norm", out)
            draft_tokens.append(int(self.model.lm_head(normed).argmax()))
            text.append(draft_tokens[-1])
            states.append(normed if normed_feedback else out)
        return draft_tokens

    def _pair(self, token: int, state: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(token))
        both = [self._norm("pre_fc_norm_embedding", embedded), self._norm("pre_fc_norm_hidden", state)]
        return self._tensors["fc.weight"] @ torch.cat(both)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        size = (x.pow(2).mean(dim=-1, keepdim=True) + self._config["rms_norm_eps"]).sqrt()
        return x / size * (1 + self._tensors[f"{name}.weight"])

    def _layer(self, x_NH: Tensor) -> Tensor:
        def product(name: str, x: Tensor) -> Tensor:
            return x @ self._tensors[f"layers.0.{name}_proj.weight"].T

        x = self._norm("layers.0.input_layernorm", x_NH)
        queries, keys, values = (product(f"self_attn.{name}", x).unflatten(-1, (-1, 8)) for name in "qkv")
        queries = self._rotated(self._norm("layers.0.self_attn.q_norm", queries))
        keys = self._rotated(self._norm("layers.0.self_attn.k_norm", keys))
        keys, values = (one.repeat_interleave(2, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / 8**0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), values)
        x_NH = x_NH + product("self_attn.o", mixed.flatten(1))
        x = self._norm("layers.0.post_attention_layernorm", x_NH)
        return x_NH + product("mlp.down", F.silu(product("mlp.gate", x)) * product("mlp.up", x))

    def _rotated(self, x_NhD: Tensor) -> Tensor:
        turns = torch.arange(len(x_NhD))[:, None, None] * 10000.0 ** (-torch.arange(4) / 4)
        left, right = x_NhD.chunk(2, dim=-1)
        return torch.cat([left * turns.cos() - right * turns.sin(), right * turns.cos() + left * turns.sin()], dim=-1)


class Watched(MTPDrafter):
    """Records proposals, and the number of tokens before each."""

    def __init__(self, network: MTPNetwork, target: Target) -> None:
        super().__init__(network, target)
        self.seen: list[tuple[list[int], Proposal]] = []

    def propose(self, state: KVCache, anchor: Tensor, plan: Plan) -> Proposal:
        self.seen.append((state.lengths, super().propose(state, anchor, plan)))
        return self.seen[-1][1]


def network(folder: Path, normed_feedback: bool = True) -> MTPNetwork:
    actual = read_drafter(folder, None, 3)
    made = MTPNetwork(type(actual.config)(**{**vars(actual.config), "normed_feedback": normed_feedback}))
    made.load_state_dict(actual.tensors)
    return made


@pytest.mark.parametrize(("backend", "normed_feedback"), [("native", True), ("native", False), ("hf", True)])
def test_draft_tokens_are_those_of_the_formula(
    backend: str, normed_feedback: bool, twin: Twin, target_dir: Path, tiny_mtp_dir: Path
) -> None:
    target = load_target(target_dir, backend=backend)
    watched = Watched(network(tiny_mtp_dir, normed_feedback), target)
    [answer] = Engine(target, watched, drafting=Drafting(None)).generate([PROMPT], SamplingParams(12, ignore_eos=True))
    text = PROMPT + answer.token_ids
    assert sum(proposal.tokens.size(1) == 4 for _, proposal in watched.seen) > 5
    for [length], proposal in watched.seen:
        anchor, *draft_tokens = proposal.tokens[0].tolist()
        assert anchor == text[length] and draft_tokens == twin(text[: length + 1], len(draft_tokens), normed_feedback)
    assert len({tuple(proposal.tokens[0].tolist()) for _, proposal in watched.seen}) > 5


def test_a_prompt_of_one_token(twin: Twin, target: Target, tiny_mtp_dir: Path) -> None:
    """The first token has no state before it, so the anchor's entry sees itself alone."""
    drafter = load_drafter(tiny_mtp_dir, target=target)
    state = drafter.new_state(1, 20)
    hidden = twin.model.model(torch.tensor([[7]])).last_hidden_state.detach()
    drafter.observe(state, torch.tensor([[7]]), hidden, [1])
    proposal = drafter.propose(state, torch.tensor([60]), ChainPlan(4, [SamplingParams()]))
    assert proposal.tokens[0, 1:].tolist() == twin([7, 60], 3)


def test_a_tree_holds_the_chain(target: Target, tiny_mtp_dir: Path) -> None:
    drafter = load_drafter(tiny_mtp_dir, target=target)
    state = drafter.new_state(1, 40)
    hidden_states = torch.randn(1, 6, target.hidden_size, generator=torch.Generator().manual_seed(0))
    drafter.observe(state, torch.tensor([PROMPT]), hidden_states, [6])
    chain = drafter.propose(state, torch.tensor([5]), ChainPlan(4, [SamplingParams()])).tokens[0].tolist()
    tree = drafter.propose(state, torch.tensor([5]), TreePlan(4, [SamplingParams()], 40))
    tokens, parents, node = tree.tokens[0].tolist(), tree.parents[0].tolist(), 0
    for token in chain[1:]:
        [node] = [at for at in range(len(tokens)) if parents[at] == node and tokens[at] == token]
    assert len(tokens) == 41
