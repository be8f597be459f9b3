"""Recurrent states of the native decoder depend on committed tokens only, not on scored ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_states import check_drafting, check_scores
from tiny_families import SMALL, make_model, write_model
from transformers import AutoConfig, Qwen3_5ForConditionalGeneration, Qwen3VLForConditionalGeneration

from blockdraft.decode.proposal import chain, chain_parents
from blockdraft.drafters.draft_lm import DraftLMDrafter
from blockdraft.nn.recurrent_mixer import CHUNK
from blockdraft.targets import Target, describe_target, load_target
from blockdraft.targets.native import NativeTarget

FAMILY = "qwen3_5_text"
HOW = pytest.mark.parametrize("way", ["", pytest.param("exact", marks=pytest.mark.slow), "compiled"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY, tmp_path_factory.mktemp(FAMILY))


def native(folder: Path, way: str = "") -> NativeTarget:
    compiled = "on" if way == "compiled" else "off"
    target = load_target(folder, dtype="float32", device="cpu", compile=compiled, exact=way == "exact")
    assert isinstance(target, NativeTarget) and target.running == ", ".join(filter(None, ["native", way]))
    return target


@HOW
def test_nodes_of_trees_and_lines_are_scored_as_their_paths_alone(
    folder: Path, way: str, scatter: Callable[..., Any]
) -> None:
    check_scores(native(folder, way), make_model(FAMILY), scatter)


@HOW
@pytest.mark.parametrize("budget", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_drafting_changes_no_answer(folder: Path, way: str, budget: int) -> None:
    check_drafting(native(folder, way), budget)


@HOW
def test_rows_keep_any_beginning_of_a_long_line(folder: Path, way: str) -> None:
    """The line is longer than a chunk."""
    target, model = native(folder, way), make_model(FAMILY)
    count, kept = 2 * CHUNK + 9, [2 * CHUNK + 9, CHUNK + 3, 2]
    tokens = torch.randint(3, 61, (3, count), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(3, count + 1)
    whole = target.forward(tokens, chain(tokens).parents, cache).logits
    cache.commit([range(length) for length in kept])
    following = target.forward(tokens[:, :1], chain_parents(3, 1), cache).logits
    for row, length in enumerate(kept):
        ids = torch.cat([tokens[row, :length], tokens[row, :1]])[None]
        with torch.no_grad():
            alone, line = model(ids).logits[0, -1], model(tokens[row : row + 1]).logits[0]
        torch.testing.assert_close(following[row, 0], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(whole[row], line, atol=1e-4, rtol=1e-4)


def test_exact_states_have_the_same_bits_however_they_came_about(folder: Path) -> None:
    """Token by token, as a line, or along a path of a tree that takes several pieces."""
    target, random = native(folder, "exact"), torch.Generator().manual_seed(1)
    text = torch.randint(3, 61, (1, 24), generator=random)

    def read(*, pieces: list[int]) -> Any:
        cache, first = target.new_cache(1, 100), 0
        for size in pieces:
            part = text[:, first : first + size]
            target.forward(part, chain(part).parents, cache)
            cache.commit([range(size)])
            first += size
        return cache

    def in_tree() -> Any:
        cache = read(pieces=[2])
        tokens, parents = torch.randint(3, 61, (1, 44), generator=random), torch.zeros(1, 44, dtype=torch.int64)
        path = range(0, 44, 2)  # wrong draft tokens between the right ones
        tokens[:, path], parents[:, path] = text[:, 2:], torch.tensor([-1, *path[:-1]])
        target.forward(tokens, parents, cache)
        cache.commit([path])
        return cache

    expected = read(pieces=[1] * 24).stored_states[0]
    for cache in (read(pieces=[24]), read(pieces=[5, 1, 18]), in_tree()):
        for mine, state in zip(cache.stored_states[0], expected, strict=True):
            assert all(torch.equal(*parts) for parts in zip(mine, state, strict=True))


def test_memory_counts_a_state_a_row(folder: Path) -> None:
    target = native(folder)
    cache, tokens = target.new_cache(3, 10), torch.zeros(3, 2, dtype=torch.int64)
    target.forward(tokens, chain(tokens).parents, cache)
    cache.commit([[0, 1]] * 3)
    assert target.cache_bytes(3, 10) == cache.nbytes + cache.state_bytes  # type: ignore[attr-defined]
    assert target.forward_bytes(2, 8, 64) > 2 * cache.state_bytes / 3  # type: ignore[attr-defined]


def test_what_takes_states_that_can_be_cut_is_refused(folder: Path) -> None:
    target = native(folder)
    assert not target.can_truncate
    with pytest.raises(ValueError, match=r"draft model .* recurrent"):
        DraftLMDrafter(target, target)


def test_the_text_part_of_a_model_with_pictures_is_run_as_transformers_does(tmp_path: Path) -> None:
    fields = {**make_model(FAMILY).config.to_dict(), "tie_word_embeddings": True}
    seeing = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    config = AutoConfig.for_model(
        "qwen3_5",
        text_config=fields,
        vision_config={**seeing, "out_hidden_size": SMALL["hidden_size"]},
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    ours: Target = native(tmp_path)
    theirs = load_target(tmp_path, dtype="float32", device="cpu", backend="hf")
    assert ours.architecture == theirs.architecture
    assert ours.source_fingerprint == theirs.source_fingerprint == describe_target(tmp_path).fingerprint()
    tokens = torch.tensor([[5, 9, 3, 7]])
    mine, expected = (
        each.forward(tokens, chain(tokens).parents, each.new_cache(1, 4)).logits for each in (ours, theirs)
    )
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_qwen3_vl_is_run_as_transformers_does(tied: bool, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    seeing = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=SMALL | {"model_type": "qwen3_vl_text", "rope_parameters": rope, "tie_word_embeddings": tied},
        vision_config={**seeing, "out_hidden_size": SMALL["hidden_size"], "deepstack_visual_indexes": [0]},
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([[5, 9, 3, 7, 60, 4]])
    ours = native(tmp_path, "compiled")
    with torch.no_grad():
        expected = model(tokens).logits
    mine = ours.forward(tokens, chain(tokens).parents, ours.new_cache(1, 6)).logits
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", ["", "compiled"])
def test_projections_of_qwen3_next_are_taken_apart(way: str, tmp_path: Path) -> None:
    target, tokens = native(write_model("qwen3_next", tmp_path), way), torch.randint(3, 61, (1, CHUNK + 9))
    with torch.no_grad():
        expected = make_model("qwen3_next")(tokens).logits
    logits = target.forward(tokens, chain(tokens).parents, target.new_cache(1, CHUNK + 9)).logits
    # Transformers' own forms, by chunks and by tokens, differ by up to 1.4e-4.
    torch.testing.assert_close(logits, expected, atol=5e-4, rtol=1e-4)
