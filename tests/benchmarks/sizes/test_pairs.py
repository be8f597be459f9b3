import json
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.sizes import pairs
from transformers import Qwen3Config

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target

SMALL = Shape(
    Qwen3Config(
        vocab_size=5000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=None,
    ),
    draft_layers=1,
    target_layers=(0, 1),
    taus=(("dflash", "an example", 4.5, "made up"),),
)


@pytest.mark.slow
def test_a_pair_of_random_weights_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    folders = pairs.make("small", tmp_path, 64)
    target = load_target(folders[0], dtype=torch.float32)
    drafter = load_drafter(folders[1], target=target)
    answers = []
    for way, drafting in ((drafter, Drafting(block_size=4)), (load_drafter("none", target=target), None)):
        [completion] = Engine(target, way, drafting=drafting).generate([[5, 6, 7]], SamplingParams(12))
        answers.append(completion.token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 12
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 8
    assert pairs.parameters(folders[0]) == 5000 * 32 + 3 * layer + 32
    assert pairs.row_lengths("small") == (32, 32, 64)


def test_a_wide_pair_has_room_for_the_longest_prompt(tmp_path: Path) -> None:
    folders = pairs.make("2", tmp_path, 4300)
    for folder in folders:
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 4300
    assert pairs.row_lengths("8") == (1792, 2048, 4608)


def test_unknown_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'qwen9' is neither a number nor a shape"):
        pairs.make("qwen9", tmp_path, 64)


def test_draft_tokens_are_right_as_often_as_was_published() -> None:
    assert pairs.acceptance("1", 500) is None
    assert pairs.acceptance("1", 4096) == pairs.PAIR_ACCEPTANCE
    acceptance_prob = pairs.acceptance("qwen3-4b", 16)
    assert acceptance_prob is not None and sum(acceptance_prob**i for i in range(16)) == pytest.approx(6.53)
