"""A tiny random target and drafters for it, small enough that every test takes a fraction of a second."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import write_checkpoint
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_config import DraftConfig, LayerAttention

LAYERS, HIDDEN, VOCAB, BLOCK_SIZE, MASK = 4, 32, 97, 8, 96


@pytest.fixture(scope="package")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,  # so that the greedy answers do not run into one repeated token
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    for layer in model.model.layers:  # so that a token's follower depends on the context, but not always
        layer.self_attn.o_proj.weight.data *= 0.02
    return model


@pytest.fixture(scope="package")
def half_model(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).to(torch.bfloat16)


def draft_config(**changes: object) -> DraftConfig:
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK,
        "target_layers": (0, 2),
        "num_target_layers": LAYERS,
        "rope_theta": 10000.0,
        "layers": (LayerAttention(causal=False, window=None),) * 2,
        "max_position_embeddings": 128,
    }
    return DraftConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="package")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compat") / "drafter"
    torch.manual_seed(1)
    config = draft_config()
    write_checkpoint(folder, config, dict(DFlashNetwork(config).state_dict()))
    return folder


@pytest.fixture(scope="package")
def wide_drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter for a target with another vocabulary."""
    folder = tmp_path_factory.mktemp("compat") / "wide"
    config = draft_config(vocab_size=VOCAB + 3)
    write_checkpoint(folder, config, dict(DFlashNetwork(config).state_dict()))
    return folder


@pytest.fixture
def greedy(model: PreTrainedModel) -> Callable[[list[int], int], list[int]]:
    """Greedy decoding by transformers."""

    def answer(ids: list[int], count: int) -> list[int]:
        mask = torch.ones(1, len(ids), dtype=torch.long)
        output = model.generate(torch.tensor([ids]), attention_mask=mask, max_new_tokens=count, do_sample=False)
        return output[0, len(ids) :].tolist()

    return answer


@pytest.fixture
def good_draft_tokens(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that propose what the target predicts from one token alone, which is often right in context too."""
    with torch.inference_mode():
        follower = model(torch.arange(VOCAB)[:, None]).logits[:, 0].argmax(dim=-1)
    draft = DFlashDrafter.draft_pass

    def informed(
        self: DFlashDrafter, state: KVCache, tokens: Tensor, first: int = 0, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        (hidden, logits), draft_token = draft(self, state, tokens, first, window), tokens[:, 0]
        for slot in range(1, tokens.size(1)):
            draft_token = follower[draft_token]
            logits[:, slot - first] += 1000 * torch.nn.functional.one_hot(draft_token, VOCAB)
        return hidden, logits

    monkeypatch.setattr(DFlashDrafter, "draft_pass", informed)
