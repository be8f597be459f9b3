"""Guesses of a P-EAGLE drafter, compared with its formula in plain loops over the files."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import load_drafter
from blockdraft.drafters.peagle.drafter import PEagleDrafter
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

TEXT = [7, 60, 33, 12, 9, 21, 5]
COUNT = 4


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir)


@pytest.fixture
def drafter(target: Target, tiny_peagle_dir: Path) -> PEagleDrafter:
    found = load_drafter(tiny_peagle_dir, target=target)
    assert isinstance(found, PEagleDrafter)
    return found


def hidden_states(length: int) -> Tensor:
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(length))


class Twin:
    """Readable twin of the network: all entries of one text at once, from the files alone."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")
        self._mask = json.loads((folder / "config.json").read_text())["mask_token_id"]

    def __call__(self, text: list[int], target_layers_NF: Tensor, count: int, window: int | None = None) -> Tensor:
        """Logits `[count, Vd]` of guesses behind the last token of a text, given the taps at the tokens before it."""
        rows = [(text[s], target_layers_NF[s - 1]) for s in range(1, len(text))]
        rows += [(self._mask, self._tensors["mask_hidden"][0, 0])] * (count - 1)
        embedded = torch.stack([self._tensors["embed_tokens.weight"][token] for token, _ in rows])
        x = torch.stack([target_layers for _, target_layers in rows]) @ self._tensors["fc.weight"].T
        both = torch.cat([self._norm("layers.0.input_layernorm", embedded), self._norm("layers.0.hidden_norm", x)], -1)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        if window is not None:  # of the text before the anchor
            hidden[len(text) - 2 :, : len(text) - 2 - window] = True
        x = self._mlp(0, x + self._attention(0, both, hidden))
        x = self._mlp(1, x + self._attention(1, self._norm("layers.1.input_layernorm", x), hidden))
        return self._norm("norm", x[-count:]) @ self._tensors["lm_head.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * self._tensors[f"{name}.weight"]

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up, down = (self._tensors[f"layers.{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        normed = self._norm(f"layers.{layer}.post_attention_layernorm", x)
        return x + (F.silu(normed @ gate) * (normed @ up)) @ down

    def _attention(self, layer: int, x: Tensor, hidden: Tensor) -> Tensor:
        parts = [x @ self._tensors[f"layers.{layer}.self_attn.{name}_proj.weight"].T for name in "qkv"]
        queries, keys, values = (part.unflatten(-1, (-1, 8)) for part in parts)
        queries, keys = self._rotated(queries), self._rotated(keys)
        keys, values = (one.repeat_interleave(2, dim=1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / 8**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), values)
        return mixed.flatten(1) @ self._tensors[f"layers.{layer}.self_attn.o_proj.weight"].T

    def _rotated(self, x_NhD: Tensor) -> Tensor:
        turns = torch.arange(len(x_NhD))[:, None, None] * 10000.0 ** (-torch.arange(4) / 4)
        left, right = x_NhD.chunk(2, dim=-1)
        return torch.cat([left * turns.cos() - right * turns.sin(), right * turns.cos() + left * turns.sin()], dim=-1)


@pytest.mark.parametrize("parts", [[6], [1, 5], [2, 1, 3]])
def test_logits_are_those_of_the_formula(drafter: PEagleDrafter, tiny_peagle_dir: Path, parts: list[int]) -> None:
    """The parts in which the text is observed make no difference."""
    state, target_layers, begin = drafter.new_state(1, 20), hidden_states(6), 0
    for count in parts:
        part = slice(begin, begin := begin + count)
        drafter.observe(state, torch.tensor([TEXT[part]]), target_layers[:, part], [count])
    logits = drafter.draft_logits(state, torch.tensor(TEXT[-1:]), ChainPlan(COUNT + 1, [SamplingParams()]))
    kept = drafter.network.kept
    wanted = Twin(tiny_peagle_dir)(TEXT, target_layers[0], COUNT)
    torch.testing.assert_close(logits[0][:, kept], wanted, atol=1e-4, rtol=1e-4)
    assert int(logits[0].isfinite().sum()) == COUNT * len(kept) == COUNT * 120


def test_a_prompt_of_one_token(drafter: PEagleDrafter, tiny_peagle_dir: Path) -> None:
    state, target_layers = drafter.new_state(1, 20), hidden_states(1)
    drafter.observe(state, torch.tensor([[7]]), target_layers, [1])
    proposal = drafter.propose(state, torch.tensor([60]), ChainPlan(COUNT + 1, [SamplingParams()]))
    best = Twin(tiny_peagle_dir)([7, 60], target_layers[0], COUNT).argmax(dim=-1)
    assert proposal.tokens[0, 1:].tolist() == drafter.network.kept[best].tolist()


def test_a_window_hides_the_older_text(drafter: PEagleDrafter, tiny_peagle_dir: Path) -> None:
    state, target_layers = drafter.new_state(1, 20), hidden_states(6)
    drafter.observe(state, torch.tensor([TEXT[:6]]), target_layers, [6])
    plan = ChainPlan(COUNT + 1, [SamplingParams()], draft_window=2)
    logits = drafter.draft_logits(state, torch.tensor(TEXT[-1:]), plan)[0][:, drafter.network.kept]
    torch.testing.assert_close(logits, Twin(tiny_peagle_dir)(TEXT, target_layers[0], COUNT, 2), atol=1e-4, rtol=1e-4)


def test_memory_is_that_of_its_state(drafter: PEagleDrafter) -> None:
    state = drafter.new_state(2, 20)
    drafter.observe(state, torch.tensor([TEXT] * 2), hidden_states(7).expand(2, -1, -1), [7, 7])
    assert sum(store.nbytes for store in state._stores()) == drafter.state_bytes(2, 20)
