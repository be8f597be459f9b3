"""Models from nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.diffusion.folder import load_model
from blockdraft.diffusion.new import new_model
from blockdraft.diffusion.sampler import Sampler
from blockdraft.diffusion.settings import NewSettings, SampleSettings
from blockdraft.errors import UsageError
from blockdraft.nn.denoiser import CausalDenoiser
from blockdraft.nn.dit import DiT

SMALL = {"layers": 2, "hidden_size": 24, "heads": 3, "context": 32, "block_size": 4}


@pytest.mark.parametrize(("kind", "network"), [("dit", DiT), ("causal", CausalDenoiser)])
def test_new_models_load_and_write(kind: str, network: type, tiny_target_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "same"):
        found = new_model(tiny_target_dir, tmp_path / name, NewSettings(kind=kind, **SMALL))  # type: ignore[arg-type]
    assert (found.mask_token, found.is_new, found.config.block_size, found.config.token_shift) == (
        "<|mask|>",
        False,
        4,
        False,
    )
    model, same = (load_model(tmp_path / name, "cpu") for name in ("one", "same"))
    assert isinstance(model.network, network) and model.config == found.config
    assert (model.network.vocab_size, model.text.max_context, model.text.eos_token_ids) == (265, 32, {2})
    other = new_model(tiny_target_dir, tmp_path / "other", NewSettings(kind=kind, seed=1, **SMALL))  # type: ignore[arg-type]
    assert other == found
    theirs, others = same.network.state_dict(), load_model(tmp_path / "other", "cpu").network.state_dict()
    ours = model.network.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert not all(torch.equal(weight, others[name]) for name, weight in ours.items())
    [chunk] = list(Sampler(model, SampleSettings(max_new_tokens=4, seed=0, ignore_eos=True)).stream([[5, 6, 7, 8]]))
    assert len(chunk.token_ids) == 4 and 3 not in chunk.token_ids


def test_the_papers_layout(tiny_target_dir: Path, tmp_path: Path) -> None:
    new_model(tiny_target_dir, tmp_path / "out", NewSettings(**SMALL))  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["model_type"] == "bd3lm" and raw["n_blocks"] == 2 and raw["cond_dim"] == 64 and raw["vocab_size"] == 265
    weights = load_model(tmp_path / "out", "cpu").network.state_dict()
    assert not weights["backbone.output_layer.linear.weight"].any()  # all tokens are as likely
    assert weights["backbone.vocab_embed.embedding"].any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 30, "heads": 4}, "hidden_size is 30 and heads 4; .*a multiple of 8, such as 24"),
        ({"block_size": 64}, "block_size is 64 and context 32"),
        ({"kind": "rnn"}, "kind is 'rnn'; it must be 'dit' or 'causal'"),
        ({"mask_token_id": 2}, "mask_token_id is 2, which ends texts"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
    ],
)
def test_bad_shapes(changes: dict[str, Any], told: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        new_model(tiny_target_dir, tmp_path / "out", NewSettings(**SMALL | changes))
    assert not list(tmp_path.iterdir())


def test_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="bare has no tokenizer; name a folder with one"):
        new_model(tmp_path / "bare", tmp_path / "out")
