"""Fill-in-the-middle prompts, for the vocabularies of several model families."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

import pytest
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import generate_merges

from blockdraft.engine import Engine, ExtraFile, InfillTokens, infill_params, infill_prompt
from blockdraft.errors import UsageError
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


def with_tokens(names: Sequence[str], special: bool = True) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(names), special_tokens=special)
    return tokenizer


def pieces_tokenizer() -> LlamaTokenizer:
    """A SentencePiece tokenizer with CodeLlama's tokens, which puts a space before every text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcxyz", "▁a", "▁b", "ab"]
    names += ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    vocab = {name: number for number, name in enumerate(names)}
    merges = generate_merges(vocab, {name: -float(number) for name, number in vocab.items()})
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    tokenizer.add_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], special_tokens=True)
    return tokenizer


def spelled(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    "names, expected",
    [
        (QWEN, "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>ab<fim_suffix>yz<fim_middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>"),
        (["[SUFFIX]", "[PREFIX]", "[MIDDLE]"], "[SUFFIX]yz[PREFIX]ab"),
    ],
)
def test_order_of_the_parts(names: list[str], expected: str) -> None:
    tokenizer = with_tokens(names)
    assert spelled(tokenizer, infill_prompt(tokenizer, "ab", "yz")) == expected


def test_repository_pattern() -> None:
    tokenizer = with_tokens(QWEN)
    extra = [ExtraFile("a.py", "A = 1"), ExtraFile("b.py", "B = 2")]
    prompt = infill_prompt(tokenizer, "ab", "", extra, name="c.py", repository="mine", begun="x")
    assert spelled(tokenizer, prompt) == (
        "<|repo_name|>mine\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n"
        "<|file_sep|>c.py\n<|fim_prefix|>ab<|fim_suffix|><|fim_middle|>x"
    )
    plain = with_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    prompt = infill_prompt(plain, "ab", "yz", extra)
    assert spelled(plain, prompt) == "A = 1\n\nB = 2\n\n<fim_prefix>ab<fim_suffix>yz<fim_middle>"


def test_pieces_begin_without_a_space_of_their_own() -> None:
    tokenizer = pieces_tokenizer()
    names = tokenizer.convert_ids_to_tokens(infill_prompt(tokenizer, "ab", " b"))
    assert names == ["<s>", "▁<PRE>", "ab", "▁<SUF>", "▁b", "▁<MID>"]


@pytest.mark.parametrize("special", [True, False])
def test_names_of_special_tokens_in_files_are_text(special: bool) -> None:
    tokenizer = with_tokens(QWEN, special)
    prompt = infill_prompt(tokenizer, "a<|fim_middle|>", "<|im_end|>", [ExtraFile("<|file_sep|>", "<|repo_name|>")])
    special = [
        token for token in prompt if token in tokenizer.all_special_ids or token in InfillTokens.of(tokenizer).ends
    ]
    assert tokenizer.convert_ids_to_tokens(special) == [
        "<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    ]  # fmt: skip


@pytest.mark.parametrize("limit", [8, 20, 60, 200])
def test_what_is_too_long_is_cut_far_from_the_cursor(limit: int) -> None:
    tokenizer = with_tokens(QWEN)
    prefix, suffix = "p" * 40 + "P", "S" + "s" * 40
    extra = [ExtraFile("old", "o" * 30), ExtraFile("new", "n" * 20)]
    prompt = infill_prompt(tokenizer, prefix, suffix, extra, max_tokens=limit)
    assert len(prompt) <= limit
    text = spelled(tokenizer, prompt)
    assert "P<|fim_suffix|>S" in text and text.endswith("<|fim_middle|>")
    assert ("old" in text) <= ("new" in text) <= ("p" * 40 in text)
    assert ("old" in text) == (limit == 200)


def test_the_last_extra_file_stays_longest() -> None:
    tokenizer = with_tokens(QWEN)
    extra = [ExtraFile("old", "o" * 30), ExtraFile("new", "n" * 20)]
    whole, last = (infill_prompt(tokenizer, "ab", "yz", files) for files in (extra, extra[1:]))
    assert infill_prompt(tokenizer, "ab", "yz", extra, max_tokens=len(whole)) == whole
    assert infill_prompt(tokenizer, "ab", "yz", extra, max_tokens=len(whole) - 1) == last
    assert infill_prompt(tokenizer, "ab", "yz", extra, max_tokens=len(last)) == last


@pytest.mark.parametrize(
    "lengths, kept", [((90, 1), (38, 1)), ((1, 90), (1, 39)), ((90, 90), (30, 10)), ((0, 90), (0, 40))]
)
def test_prefix_and_suffix_take_the_room_that_the_other_leaves(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    tokenizer = with_tokens(QWEN)
    prompt = infill_prompt(tokenizer, "x" * lengths[0], "y" * lengths[1], max_tokens=43)
    assert spelled(tokenizer, prompt) == f"<|fim_prefix|>{'x' * kept[0]}<|fim_suffix|>{'y' * kept[1]}<|fim_middle|>"


def test_typing_seldom_moves_the_beginning_of_a_prefix_that_is_cut() -> None:
    tokenizer = with_tokens(QWEN)
    text = "".join(chr(ord("A") + i % 7) for i in range(300))
    prompts = [infill_prompt(tokenizer, text[:count], "y", max_tokens=160) for count in range(200, 240)]
    prompts += [infill_prompt(tokenizer, text[:200], "y", begun=text[:count], max_tokens=160) for count in range(40)]
    assert all(140 < len(prompt) <= 160 for prompt in prompts)
    moves = sum(one[:50] != other[:50] for one, other in zip(prompts, prompts[1:], strict=False))
    assert moves <= 10


def test_what_is_too_long_for_the_cache_is_cut(tmp_path: Path, tiny_target_dir: Path) -> None:
    tokenizer = with_tokens(QWEN)
    config = AutoConfig.from_pretrained(tiny_target_dir, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with Engine(load_target(tmp_path), cache_tokens=120) as engine:
        completion = engine.infill("p" * 500, "s" * 500, params=SamplingParams(5, ignore_eos=True))
    assert completion.error is None and 100 < completion.prompt_tokens < 120


def test_a_lone_surrogate_is_refused() -> None:
    tokenizer = with_tokens(QWEN)
    for texts, name in ((("a\ud800", "b"), "prefix"), (("a", "\udfff"), "suffix")):
        with pytest.raises(UsageError, match=f"{name} holds a lone surrogate"):
            infill_prompt(tokenizer, *texts)


def test_tokens_that_are_added_later_count() -> None:
    tokenizer = tiny_tokenizer()
    assert InfillTokens.of(tokenizer) is None
    tokenizer.add_tokens(QWEN)
    assert InfillTokens.of(tokenizer) is not None


def test_no_room() -> None:
    with pytest.raises(UsageError, match="leaves 3 tokens for the prompt of an infill"):
        infill_prompt(with_tokens(QWEN), "a", "b", max_tokens=3)


@pytest.mark.parametrize("names", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["<|file_sep|>"]])
def test_a_model_without_infill_is_refused(names: list[str]) -> None:
    tokenizer = with_tokens(names)
    assert InfillTokens.of(tokenizer) is None and InfillTokens.of(None) is None
    assert infill_params(tokenizer, SamplingParams(5)) == SamplingParams(5)
    with pytest.raises(UsageError, match="no fill-in-the-middle tokens"):
        infill_prompt(tokenizer, "a", "b")


@pytest.mark.parametrize("special", [True, False])
def test_an_infill_ends_at_a_separator_and_shows_none(special: bool, tmp_path: Path, tiny_target_dir: Path) -> None:
    tokenizer = with_tokens(QWEN, special)
    config = AutoConfig.from_pretrained(tiny_target_dir, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with Engine(load_target(tmp_path)) as engine:
        for name in (*QWEN, "<|endoftext|>"):
            [end] = tokenizer.convert_tokens_to_ids([name])
            completion = engine.infill("ab", "yz", [ExtraFile("f", "g")], SamplingParams(9, logit_bias={end: 100}))
            assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [end], "stop"), name
        completion = engine.infill("ab", "yz", params=SamplingParams(5, logit_bias={token("q"): 100}))
        assert (completion.text, completion.finish_reason) == ("qqqqq", "length")
        with pytest.raises(UsageError, match="ask for fewer new tokens"):
            engine.infill("ab", "yz", params=SamplingParams(config.max_position_embeddings - 2))


def test_typing_reads_what_is_new(tmp_path: Path, tiny_target_dir: Path) -> None:
    """Each keystroke reads the tokens from the first one that differs, also if the last token before it changes."""
    tokenizer = with_tokens(QWEN)
    config = AutoConfig.from_pretrained(tiny_target_dir, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text, suffix, params = "def f(x):\n    return x + 1 # ", "\n\nprint(f(2))\n", SamplingParams(6)
    prompts = [
        infill_prompt(tokenizer, text + typed, suffix) for typed in ("", "t", "th", "the", "the ", "the a", "th")
    ]
    # A line that an editor sends behind the middle token, so that the suffix is not read again.
    prompts += [infill_prompt(tokenizer, text, suffix, begun=begun) for begun in ("t", "th", "the a", "the an")]
    with Engine(load_target(tmp_path), prefix_tokens=8192) as engine, Engine(engine.target) as fresh:
        for i, prompt in enumerate(prompts):
            completion = engine.submit(prompt, params, urgent=True).result()
            known = [len(commonprefix([earlier, prompt[:-1]])) for earlier in prompts[:i]]
            assert completion.stats.remembered == max(known, default=0)
            assert completion.token_ids == fresh.generate([prompt], params)[0].token_ids
    assert max(known) == len(prompts[-2])


def test_a_target_without_infill(tiny_target_dir: Path) -> None:
    with Engine(load_target(tiny_target_dir)) as engine, pytest.raises(UsageError, match="no fill-in-the-middle"):
        engine.infill("a", "b")


def token(text: str) -> int:
    [number] = tiny_tokenizer()(text)["input_ids"]
    return int(number)
