"""`blockdraft generate` on tiny random models: what it prints, and how it refuses."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from standard_stream import ESCAPES, Stream
from tiny_models import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from blockdraft.cli import answers, display
from blockdraft.cli.answers import Comparison, slower_note
from blockdraft.drafters import load_drafter
from blockdraft.engine import Chunk, Completion, Engine, Stats
from blockdraft.engine.text import AnswerText
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "tau",
    "steps",
    "drafted_steps",
    "draft_vocab",
    "drafter_bits",
    "acceptance_by_position",
    "tokens_per_second",
    "backend",
    "running",
}
COMPARE_KEYS = {"plain_tokens_per_second", "speedup", "identical"}


Run = Callable[..., Any]


@pytest.fixture
def generate(blockdraft: Run, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Run:
    """Runs `blockdraft generate` on the tiny pair, 20 tokens by default; later options win."""

    def blockdraft_generate(*args: object, **streams: Any) -> Any:
        pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
        return blockdraft("generate", *pair, "--device", "cpu", "--max-new-tokens", 20, *args, **streams)

    return blockdraft_generate


@pytest.fixture
def expected(tiny_target_dir: Path, tiny_drafter_dir: Path) -> dict[str, Any]:
    """The answer to "hello" of the library itself."""
    target = load_target(tiny_target_dir, device="cpu")
    [completion] = Engine(target, load_drafter(tiny_drafter_dir, target=target)).generate(
        ["hello"], SamplingParams(max_new_tokens=20)
    )
    return {"text": completion.text, "token_ids": completion.token_ids}


def test_a_pipe_gets_the_answer_and_nothing_else(generate: Run, expected: dict[str, Any]) -> None:
    assert generate("hello") == (0, expected["text"] + "\n", "")


def test_colours_forced_by_the_environment_stay_out_of_pipes(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in generate("hello", "--compare").out


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_the_backend_changes_nothing_but_itself(generate: Run, expected: dict[str, Any], backend: str) -> None:
    answer = json.loads(generate("hello", "--json", "--backend", backend).out)
    assert (answer["backend"], answer["token_ids"]) == (backend, expected["token_ids"])


def test_another_chat_template(generate: Run, tiny_target_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("Q: {{ messages[0].content }}\nA:", encoding="utf-8")
    answer = json.loads(generate("hello", "--json", "--chat-template", file).out)
    target = load_target(tiny_target_dir, device="cpu")
    assert target.tokenizer is not None
    prompt = target.tokenizer("Q: hello\nA:")["input_ids"]
    with Engine(target) as engine:
        [completion] = engine.generate([prompt], SamplingParams(max_new_tokens=20))
    assert answer["token_ids"] == completion.token_ids
    missing = generate("hello", "--chat-template", tmp_path / "none.jinja")
    assert missing.code == 2 and "none.jinja cannot be read (No such file or directory)" in missing.err
    for wrong, message in (("{% for m in", "line 1: unexpected 'end of template'"), (" \n", "is empty")):
        file.write_text(wrong)
        refused = generate("hello", "--chat-template", file)
        assert refused.code == 2 and "--chat-template must be a" in refused.err and message in refused.err


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_exact_target_is_reported(generate: Run, expected: dict[str, Any], backend: str) -> None:
    answer = json.loads(generate("hello", "--json", "--exact", "--backend", backend, "--compile", "off").out)
    assert (answer["running"], answer["token_ids"]) == (f"{backend}, exact", expected["token_ids"])


def test_reason_for_another_backend_is_reported(generate: Run, tiny_target_dir: Path, tmp_path: Path) -> None:
    relu = tmp_path / "relu"
    shutil.copytree(tiny_target_dir, relu)
    config = json.loads((relu / "config.json").read_text())
    (relu / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    result = generate("hello", "--json", "--target", relu)
    assert (result.code, json.loads(result.out)["backend"]) == (0, "hf")
    assert result.err.startswith("The target runs on transformers (backend hf): its activation relu is none of ")
    asked = generate("hello", "--target", relu, "--backend", "hf")
    assert (asked.code, asked.err) == (0, "")
    refused = generate("hello", "--target", relu, "--backend", "native")
    assert (refused.code, refused.out) == (2, "") and "its activation relu" in refused.err
    assert generate("hello", "--backend", "fast").code == 2


def test_json(generate: Run, expected: dict[str, Any]) -> None:
    for terminal in (False, True):
        result = generate("hello", "--json", "--tree-budget", 0, "--block-size", 4, terminal=terminal)
        answer = json.loads(result.out)
        assert (result.code, result.err, answer.keys()) == (0, "", KEYS | {"memory"})
        memory = answer["memory"]
        parts = [memory[name] for name in ("weights", "caches", "workspace")]
        assert all(type(part) is int and part > 0 for part in parts) and sum(parts) == memory["planned"]
        assert memory["measured"] is None or 0 <= memory["measured"] < 1 << 33
        assert {key: answer[key] for key in expected} == expected
        assert answer["finish_reason"] in ("stop", "length")
        assert all(type(answer[key]) is float for key in ("tau", "tokens_per_second"))
        assert 1 <= answer["tau"] <= 8
        assert len(answer["acceptance_by_position"]) == 3
        assert all(type(share) is float for share in answer["acceptance_by_position"])


def test_slower_drafting_is_reported(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    drafter = load_drafter(tiny_drafter_dir, target=target)
    fixed, auto = Engine(target, drafter, drafting=Drafting(None)), Engine(target, drafter, drafting=Drafting("auto"))

    def note(engine: Engine, plain_seconds: float) -> str:
        runs = Stats([2] * 50, [7] * 50, total_seconds=2.0), Stats([1] * 100, [0] * 100, total_seconds=plain_seconds)
        drafted, plain = (Completion("", [], "stop", [], stats) for stats in runs)
        return slower_note(engine, Comparison(drafted, plain, None)) or ""

    assert "speed-up 0.50" in note(fixed, 1.0) and "--drafter none, or --block-size auto" in note(fixed, 1.0)
    assert note(auto, 1.0).endswith("use --drafter none.")
    assert not note(fixed, 2.05) and not note(Engine(target), 1.0)


def test_compare_json(generate: Run, expected: dict[str, Any]) -> None:
    result = generate("hello", "--json", "--compare", "--block-size", 4)
    answer = json.loads(result.out)
    assert (result.code, answer.keys()) == (0, KEYS | COMPARE_KEYS | {"memory"})
    assert result.err == "" or result.err.startswith("Drafting is slower here than plain decoding")
    assert answer["identical"] is True
    assert answer["token_ids"] == expected["token_ids"]
    assert answer["speedup"] == answer["tokens_per_second"] / answer["plain_tokens_per_second"]


def test_compare_json_of_one_token(generate: Run) -> None:
    answer = json.loads(generate("hello", "--json", "--compare", "--max-new-tokens", 1).out)
    assert (answer["speedup"], answer["tau"], answer["acceptance_by_position"]) == (None, 1.0, [])


def test_compare_draws_one_seed_for_all_runs(generate: Run) -> None:
    assert json.loads(generate("hello", "--json", "--compare", "--temperature", 1).out)["identical"] is True


def test_compare_in_a_pipe(generate: Run, expected: dict[str, Any]) -> None:
    result = generate("hello", "--compare", "--block-size", 4)
    assert result.code == 0
    assert result.out.startswith(expected["text"] + "\n\n")
    table = result.out.removeprefix(expected["text"] + "\n\n")
    assert table.isascii()
    assert re.search(r"^drafted +20 +\d\.\d\d +\d+\.\d( +\d+\.\d\d){3}$", table, re.M)
    assert re.search(r"^plain +20 +1\.00 +\d+\.\d( +\d+\.\d\d){3}$", table, re.M)
    assert re.search(r"^accepted by position, %:( \d+){3}$", table, re.M)
    assert re.search(r"^speed-up: \d+\.\d\d \((\d+) of \1 steps drafted\); tokens: identical$", table, re.M)


def test_the_first_difference_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    run = Completion("", [0] * 6, "stop", [], Stats([1, 2, 1, 1], [0, 3, 0, 1], total_seconds=1.0))
    answers.show_comparison(display.standard(), Comparison(run, run, 4))
    assert "tokens: differ, first at token 5\n" in capsys.readouterr().out


def test_a_draft_vocabulary_is_reported(generate: Run) -> None:
    few = ("hello", "--draft-vocab", 40)
    assert "proposes" not in generate("hello", terminal=True).out
    assert ", the drafter proposes 40 of 265 tokens" in generate(*few, terminal=True).out.replace("\n", "")
    assert "\nThe drafter proposes 40 of 265 tokens.\nspeed-up: " in generate(*few, "--compare").out
    assert [json.loads(generate(*words, "--json").out)["draft_vocab"] for words in (few, few[:1])] == [40, None]


def test_bits_of_the_drafter_are_reported(generate: Run) -> None:
    rounded = ("hello", "--quantize", "int8")
    assert "weights of" not in generate("hello", terminal=True).out
    assert ", the drafter has weights of 8 bits" in generate(*rounded, terminal=True).out.replace("\n", "")
    both = generate(*rounded, "--draft-vocab", 40, "--compare").out
    assert "\nThe drafter proposes 40 of 265 tokens and has weights of 8 bits.\nspeed-up: " in both
    kept_ids = (*rounded, "--keep-drafter")
    assert [json.loads(generate(*words, "--json").out)["drafter_bits"] for words in (rounded, kept_ids)] == [8, None]


@pytest.mark.parametrize(
    ("args", "expected_error"),
    [
        (("--sampled",), "--sampled changes nothing at temperature 0, which decodes greedily; add --temperature T.\n"),
        (("--top-k", 5, "--min-p", 0.1), "--top-k and --min-p change nothing at temperature 0"),
        (("--top-p", 1.0), ""),
        (("--sampled", "--temperature", 1), ""),
        (("--top-k", -1), "error: --top-k must be "),
    ],
)
def test_sampling_options_without_effect_are_reported(
    generate: Run, args: tuple[object, ...], expected_error: str
) -> None:
    assert generate("hello", "--max-new-tokens", 2, "--block-size", 4, *args).err.startswith(expected_error)
    assert expected_error or not generate("hello", "--max-new-tokens", 2, "--block-size", "auto", *args).err


def test_a_terminal_shows_the_answer_and_a_summary(generate: Run, expected: dict[str, Any]) -> None:
    result = generate("hello", terminal=True)
    shown = ESCAPES.sub("", result.out)
    assert (result.code, result.err) == (0, "")
    assert shown.startswith(expected["text"] + "\n\n")
    summary = (
        r"20 tokens, \d+ drafted, tau \d\.\d\d, \d+\.\d tokens/s, finish reason: length, backend: native(, compiled)?\n"
    )
    assert re.fullmatch(summary, shown.removeprefix(expected["text"] + "\n\n"))
    assert "tokens: identical" in generate("hello", "--compare", terminal=True).out


def test_drafted_tokens_are_coloured_and_characters_stay_whole(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    ids = tokenizer("a\tö[b]€")["input_ids"]
    assert len(ids) == len("a\tö[b]€".encode())
    stats = Stats(committed=[2, 3, 3], total_seconds=2.0)
    chunks = [  # ö is cut by two chunks, and € is never finished
        Chunk("", tuple(ids[:1]), (False,), stats),
        Chunk("", tuple(ids[1:3]), (True, False), stats),
        Chunk("", tuple(ids[3:6]), (True, True, False), stats),
        Chunk("", tuple(ids[6:9]), (True, True, False), stats, "length"),
    ]
    out = Stream(terminal=True)
    with redirect_stdout(out):
        _, summary = answers.show_chunks(display.standard(), chunks, AnswerText(tokenizer, ()))
    green, end = "\x1b[32m", "\x1b[0m"
    assert out.text() == f"a{green}\t{end}{green}ö{end}{green}[{end}b{green}]{end}\N{REPLACEMENT CHARACTER}\n"
    assert summary.plain.startswith("9 tokens, 5 drafted, tau 2.67, ")


def test_prompt_from_standard_input(generate: Run, expected: dict[str, Any]) -> None:
    assert generate(stdin=b"hello\n").out == expected["text"] + "\n"
    assert generate("-", stdin=b"hello").out == expected["text"] + "\n"
    assert generate(stdin=b"\xef\xbb\xbfhello\r\n").out == expected["text"] + "\n"  # as Windows writes


def test_a_suffix_needs_a_model_that_fills_in(generate: Run) -> None:
    refused(generate("hello", "--suffix", "world"), "no fill-in-the-middle tokens")
    refused(generate("--prompts", "x.jsonl", "--suffix", "world"), "--suffix")


def test_a_suffix(blockdraft: Callable[..., Any], tmp_path: Path, tiny_target_dir: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], special_tokens=True)
    config = AutoConfig.from_pretrained(tiny_target_dir, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with Engine(load_target(tmp_path, device="cpu")) as engine:
        completion = engine.infill("ab", "yz", params=SamplingParams(12))
        at_beginning = engine.infill("", "yz", params=SamplingParams(12))
    words = ("--suffix", "yz", "--target", tmp_path, "--device", "cpu", "--drafter", "none", "--max-new-tokens", 12)
    assert blockdraft("generate", "ab", *words).out == completion.text + "\n"
    assert blockdraft("generate", "", *words).out == at_beginning.text + "\n"


def test_without_a_drafter(generate: Run, expected: dict[str, Any]) -> None:
    answer = json.loads(generate("hello", "--json", "--drafter", "none").out)
    assert {key: answer[key] for key in expected} == expected
    assert (answer["tau"], answer["acceptance_by_position"]) == (1.0, [])


def test_same_seed_same_answer(generate: Run) -> None:
    hot = ("hello", "--temperature", 1)
    first = generate(*hot, "--seed", 1).out
    assert generate(*hot, "--seed", 1).out == first
    assert generate(*hot, "--seed", 1, "--drafter", "none").out == first
    assert generate(*hot, "--seed", 2).out != first
    assert generate(*hot).out != generate(*hot).out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hello", "--top-p", "0"], "--top-p must be at least 1e-30, got '0'"),
        (["hello", "--max-new-tokens", "250"], "the target's context of 256"),
        (["hello", "--block-size", "9"], "block-size must be at most 8 for this drafter, got 9"),
        (["hello", "--compare", "--sampled", "--temperature", "1"], "--compare and --sampled exclude each other"),
        (["hello", "--block-size", "many"], "--block-size must be a whole number or 'auto', got 'many'"),
        (["hello", "--device", "abacus"], "abacus"),
        (["hello", "--target", "/no/such/folder"], "/no/such/folder"),
        (["hello", "--drafter", "/no/such/folder"], "/no/such/folder is no drafter"),
        ([""], "The prompt is empty"),
        ([], "The prompt is empty"),
        (["\udcff"], "The prompt is not valid UTF-8 text"),
    ],
)
def test_bad_input(generate: Run, args: list[str], message: str) -> None:
    refused(generate(*args), message)


def test_undecodable_standard_input(generate: Run) -> None:
    refused(generate(stdin=b"caf\xe9"), "Standard input is not utf-8 text")


def test_no_prompt_at_a_terminal(generate: Run) -> None:
    refused(generate(typing=True), "There is no prompt")


def test_named_drafters_are_in_the_help(blockdraft: Run, tiny_target_dir: Path) -> None:
    words = " ".join(re.sub(r"[│\s]+", " ", ESCAPES.sub("", blockdraft("generate", "--help-all").out)).split())
    with pytest.raises(ValueError, match="names") as refusal:
        load_drafter("nonesuch", target=load_target(tiny_target_dir))
    names = str(refusal.value).partition("one of the names ")[2].removesuffix(".").split(", ")
    assert len(names) >= 2 and all(f"{name} (" in words for name in names)


def test_target_without_drafter(blockdraft: Run, tiny_target_dir: Path) -> None:
    result = blockdraft("generate", "hello", "--target", tiny_target_dir, "--max-new-tokens", 4, "--seed", 1)
    assert result.code == 0 and "Using lookup" in result.err


def test_version(blockdraft: Run) -> None:
    assert re.fullmatch(r"blockdraft \d+\.\d+\.\d+\S*\n", blockdraft("--version").out)


def refused(result: Any, message: str) -> None:
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ") and message in result.err
    assert "Traceback" not in result.err


def test_a_file_of_prompts(generate: Run, expected: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    texts = ["hello", "good day to you", "hello"]
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    result = generate("--prompts", file, "--batch-size", 2, "--json")
    assert (result.code, result.err) == (0, "")
    answers = sorted((json.loads(line) for line in result.out.splitlines()), key=lambda answer: answer["index"])
    assert [(answer["index"], answer["prompt"]) for answer in answers] == list(enumerate(texts))
    assert all(answer.keys() == KEYS | {"index", "prompt"} for answer in answers)
    for answer in (answers[0], answers[2]):
        assert {name: answer[name] for name in expected} == expected
    assert len(answers[1]["token_ids"]) <= 20


def test_options_that_exclude_a_file_of_prompts(generate: Run, tmp_path: Path) -> None:
    for other in ("hello", "--compare"):
        result = generate("--prompts", tmp_path / "prompts.jsonl", other)
        assert result.code == 2 and "exclude each other" in result.err
    assert "cannot be read" in generate("--prompts", tmp_path / "absent.jsonl").err


def test_penalties_and_stops_shape_the_answer(generate: Run, expected: dict[str, Any]) -> None:
    assert generate("hello", "--repetition-penalty", 3).out != generate("hello").out
    text = expected["text"]
    cut = generate("hello", "--stop", text[5:8], "--stop", "no such text").out.removesuffix("\n")
    assert text.startswith(cut) and len(cut) < len(text) and text[5:8] not in cut


def test_a_terminal_shows_what_a_pipe_gets_up_to_a_stop_string(generate: Run, expected: dict[str, Any]) -> None:
    stop = expected["text"][5:8]
    answer = generate("hello", "--stop", stop).out.removesuffix("\n")
    assert stop not in answer
    shown = ESCAPES.sub("", generate("hello", "--stop", stop, terminal=True).out)
    assert shown.startswith(answer + "\n\n") and "finish reason: stop" in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_a_request_that_fails_ends_with_its_error(
    generate: Run, altered: Callable[..., Path], tiny_target_dir: Path, terminal: bool
) -> None:
    [nan] = AutoTokenizer.from_pretrained(tiny_target_dir)("Q")["input_ids"]
    result = generate("helloQ", "--target", altered(nan_token=nan), "--drafter", "none", terminal=terminal)
    assert result.code == 1 and result.err.startswith("error: ") and "finite" in result.err
