"""Which token becomes the mask, by what the target has."""

from pathlib import Path

import pytest
import torch
from copies import copy_with

from blockdraft.targets import Target, load_target
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.mask_token import mask_token


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


def data(folder: Path, tokens: torch.Tensor) -> TokenData:
    writer = DataWriter(folder, {"tokenizer": "any"})
    writer.begin()
    writer.add(0, [Document(tokens, torch.ones(len(tokens), dtype=torch.bool))])
    writer.finish()
    return read_data(folder)


def test_the_one_named(target: Target, tiny_data_dir: Path) -> None:
    assert mask_token(target, 260) == (260, None)
    choice = mask_token(target, 100, read_data(tiny_data_dir))
    assert choice.id == 100 and choice.why is not None and "times in the data; outputs stay the same" in choice.why
    with pytest.raises(ValueError, match=r"mask_token_id is 5000 and the target's vocabulary has 265 tokens, 0 to 264"):
        mask_token(target, 5000)
    with pytest.raises(ValueError, match="mask_token_id is 2, which ends outputs"):
        mask_token(target, 2)


def test_that_of_the_tokenizer(target: Target) -> None:
    assert target.tokenizer is not None
    assert mask_token(target) == (target.tokenizer.mask_token_id, None) == (3, None)


@pytest.mark.parametrize("nil", [False, True])
def test_an_unused_row_unless_it_is_nil(nil: bool, target: Target) -> None:
    assert target.tokenizer is not None
    target.tokenizer.mask_token = None
    vocab_size = target.vocab_size + 1  # an entry of the embedding that no token uses
    embed = lambda tokens: torch.full((*tokens.shape, 32), 0.0 if nil else 1.0)  # noqa: E731
    choice = mask_token(copy_with(target, vocab_size=vocab_size, embed=embed))
    assert (choice.why == "an entry of the embedding that no token uses") != nil
    assert nil or choice.id == 265


def test_a_reserved_token_then_the_padding_then_the_rarest(target: Target, tmp_path: Path) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    tokenizer.mask_token = None
    names = tokenizer.get_vocab()
    embed = target.embed
    renamed = {"<|reserved_7|>" if token == 40 else name: token for name, token in names.items()}
    target = copy_with(
        target,
        eos_token_ids=frozenset({2}),  # and not the padding, whose embedding is nil here until it is given one
        embed=lambda tokens: embed(tokens) + (tokens == 0).unsqueeze(-1),
        tokenizer=copy_with(tokenizer, get_vocab=lambda: renamed),
    )
    assert mask_token(target) == (40, "'<|reserved_7|>', which the data do not hold")
    assert mask_token(target, None, data(tmp_path / "a", torch.tensor([40, 41]))).id == tokenizer.pad_token_id == 0
    every = torch.arange(265).repeat(2)
    choice = mask_token(target, None, data(tmp_path / "b", every[every != 77]))
    assert choice.id == 77 and choice.why is not None
    assert "which the data do not hold, because every entry" in choice.why
    choice = mask_token(target, None, data(tmp_path / "c", torch.cat([every, every[every != 99]])))
    assert choice.id == 99 and choice.why is not None and "the rarest in the data, 2 times" in choice.why
