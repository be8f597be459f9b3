"""`blockdraft generate` on tiny random models: what it prints, and how it refuses."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from standard_stream import ESCAPES, Stream
from transformers import AutoTokenizer

from blockdraft import cli
from blockdraft.cli import answers, display
from blockdraft.cli.answers import Comparison, compare_with_plain, slower_note
from blockdraft.drafters import load_drafter
from blockdraft.engine import Chunk, Completion, Engine, Request, Stats
from blockdraft.engine.adaptive import costs as stored_costs
from blockdraft.errors import BlockdraftError, NumbersError, RequestError
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

KEYS = {
    "text",
    "token_ids",
    "finish_reason",
    "tau",
    "cycles",
    "drafted_cycles",
    "draft_vocab",
    "drafter_bits",
    "acceptance_by_position",
    "tokens_per_second",
    "backend",
    "running",
}
COMPARE_KEYS = {"plain_tokens_per_second", "speedup", "identical"}


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `blockdraft` with arguments, in a pipe unless told otherwise."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def blockdraft(*args: object, stdin: bytes = b"", stdin_terminal: bool = False, terminal: bool = False) -> Result:
        out, err = Stream(terminal=terminal), Stream()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["blockdraft", *map(str, args)])
            patch.setattr(sys, "stdin", Stream(stdin, stdin_terminal))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as exit_info:
                cli.main()
        return Result(int(exit_info.value.code or 0), out.text(), err.text())

    return blockdraft


@pytest.fixture
def generate(run: Run, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Run:
    """Runs `blockdraft generate` on the tiny pair, 20 tokens unless told otherwise; later options win."""

    def blockdraft_generate(*args: object, **streams: Any) -> Result:
        pair = ("--target", tiny_target_dir, "--drafter", tiny_drafter_dir)
        return run("generate", *pair, "--device", "cpu", "--max-new-tokens", 20, *args, **streams)

    return blockdraft_generate


@pytest.fixture
def expected(tiny_target_dir: Path, tiny_drafter_dir: Path) -> Iterator[dict[str, Any]]:
    """The answer to "hello" of the library itself."""
    target = load_target(tiny_target_dir, device="cpu")
    [completion] = Engine(target, load_drafter(tiny_drafter_dir, target=target)).generate(
        ["hello"], SamplingParams(max_new_tokens=20)
    )
    yield {"text": completion.text, "token_ids": completion.token_ids}


def test_a_pipe_gets_the_answer_and_nothing_else(generate: Run, expected: dict[str, Any]) -> None:
    assert generate("hello") == Result(0, expected["text"] + "\n", "")


def test_colours_forced_by_the_environment_stay_out_of_pipes(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in generate("hello", "--compare").out


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_the_backend_changes_nothing_but_itself(generate: Run, expected: dict[str, Any], backend: str) -> None:
    answer = json.loads(generate("hello", "--json", "--backend", backend).out)
    assert (answer["backend"], answer["token_ids"]) == (backend, expected["token_ids"])


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_an_exact_target_says_so(generate: Run, expected: dict[str, Any], backend: str) -> None:
    answer = json.loads(generate("hello", "--json", "--exact", "--backend", backend, "--compile", "off").out)
    assert (answer["running"], answer["token_ids"]) == (f"{backend}, exact", expected["token_ids"])


def test_why_the_native_decoder_does_not_run_the_target_is_reported(
    generate: Run, tiny_target_dir: Path, tmp_path: Path
) -> None:
    for file in tiny_target_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    result = generate("hello", "--json", "--target", tmp_path)
    assert (result.code, json.loads(result.out)["backend"]) == (0, "hf")
    assert result.err.startswith("The target runs on transformers (backend hf): its activation relu is none of ")
    asked = generate("hello", "--target", tmp_path, "--backend", "hf")
    assert (asked.code, asked.err) == (0, "")
    refused = generate("hello", "--target", tmp_path, "--backend", "native")
    assert (refused.code, refused.out) == (2, "") and "its activation relu" in refused.err
    assert generate("hello", "--backend", "fast").code == 2


def test_json(generate: Run, expected: dict[str, Any]) -> None:
    for terminal in (False, True):
        result = generate("hello", "--json", "--tree-budget", 0, "--block-size", 4, terminal=terminal)
        answer = json.loads(result.out)
        # On a machine that is busy by now, drafting may look slow beside what plain cycles took before.
        assert not result.err or result.err.startswith("Drafting is slower here")
        assert (result.code, answer.keys()) == (0, KEYS | {"memory"})
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


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), Drafting("auto")),
        (("--draft-window", 9), Drafting("auto", draft_window=9)),
        (("--block-size", 4), Drafting(4)),
        (("--block-size", 4, "--sampled"), Drafting(4, sampled=True)),
        (("--sampled",), Drafting("auto", sampled=True)),
        (("--tree-budget", 0), Drafting("auto")),
        (("--tree-budget", "auto"), Drafting(tree_budget="auto")),
        (("--block-size", 3, "--tree-budget", 7), Drafting(3, 7)),
    ],
)
def test_how_far_is_drafted_is_left_to_the_engine_unless_a_size_is_named(
    generate: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[object, ...], expected: Drafting
) -> None:
    made = []

    class Watched(Engine):
        def __init__(self, *args: Any, **how: Any) -> None:
            made.append(how["drafting"])
            super().__init__(*args, **how)

    monkeypatch.setattr("blockdraft.engine.Engine", Watched)
    assert generate("hello", "--max-new-tokens", 2, *args).code == 0
    assert made == [expected]


def test_it_is_reported_when_drafting_is_slower(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    target = load_target(tiny_target_dir, device="cpu")
    drafter = load_drafter(tiny_drafter_dir, target=target)
    fixed, auto = Engine(target, drafter, drafting=Drafting(None)), Engine(target, drafter, drafting=Drafting("auto"))
    answer = Stats([2] * 50, [7] * 50, total_seconds=2.0)  # 50 tokens a second

    def measured(plain_seconds: float) -> Comparison:
        plain = Stats([1] * 100, [0] * 100, total_seconds=plain_seconds)
        drafted, other = (Completion("", [], "stop", [], stats) for stats in (answer, plain))
        return Comparison(drafted, other, None)

    told = slower_note(fixed, answer, measured(1.0))
    assert told is not None and "speed-up 0.50" in told and "--drafter none, or --block-size auto" in told
    told = slower_note(auto, answer, measured(1.0))
    assert told is not None and told.endswith("use --drafter none.")
    assert slower_note(fixed, answer, measured(2.05)) is None
    assert slower_note(fixed, Stats(), None) is None
    assert slower_note(fixed, answer, None) is None  # nothing is known
    for plain, slower in ((0.01, True), (0.03, False)):  # seconds of a cycle
        costs = stored_costs.Costs((1,), (plain,), ((),), ((),), 0.0)
        stored_costs.store(stored_costs.path(target, drafter), costs, stored_costs.pair_of(target, drafter))
        assert (slower_note(fixed, answer, None) is not None) == slower
        assert slower_note(auto, answer, None) is None
    assert slower_note(Engine(target), answer, measured(1.0)) is None


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


def test_compare_reports_the_first_difference(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(tiny_target_dir, device="cpu")
    engine = Engine(target, load_drafter("none", target=target))
    decode = Engine.generate

    def faulty(self: Engine, *args: Any) -> Any:
        completions = decode(self, *args)
        if self is engine:
            completions[0].token_ids[4] += 1
        return completions

    monkeypatch.setattr(Engine, "generate", faulty)
    comparison = compare_with_plain(engine, "hello", SamplingParams(max_new_tokens=10))
    assert comparison.first_difference == 4
    answers.show_comparison(display.plain(), comparison)
    assert "tokens: differ, first at token 5\n" in capsys.readouterr().out
    assert answers.as_dict(comparison.drafted, comparison, engine)["identical"] is False


def test_a_comparison_says_how_many_cycles_drafted(capsys: pytest.CaptureFixture[str]) -> None:
    run = Completion("", [0] * 6, "stop", [], Stats([1, 2, 1, 1], [0, 3, 0, 1], total_seconds=1.0))
    answers.show_comparison(display.plain(), Comparison(run, run, None))
    assert "speed-up: 1.00 (2 of 4 steps drafted); tokens: identical\n" in capsys.readouterr().out


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
    kept = (*rounded, "--keep-drafter")
    assert [json.loads(generate(*words, "--json").out)["drafter_bits"] for words in (rounded, kept)] == [8, None]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--sampled",), "--sampled changes nothing at temperature 0, which decodes greedily; add --temperature T.\n"),
        (("--top-k", 5, "--min-p", 0.1), "--top-k and --min-p change nothing at temperature 0"),
        (("--top-p", 1.0), ""),
        (("--sampled", "--temperature", 1), ""),
        (("--top-k", -1), "error: --top-k is -1"),
    ],
)
def test_what_only_sampling_heeds_is_reported_where_decoding_is_greedy(
    generate: Run, args: tuple[object, ...], told: str
) -> None:
    assert generate("hello", "--max-new-tokens", 2, "--block-size", 4, *args).err.startswith(told)
    assert told or not generate("hello", "--max-new-tokens", 2, "--block-size", "auto", *args).err


def test_a_terminal_shows_the_answer_and_a_summary(generate: Run, expected: dict[str, Any]) -> None:
    result = generate("hello", terminal=True)
    shown = ESCAPES.sub("", result.out)
    assert (result.code, result.err) == (0, "")
    assert shown.startswith(expected["text"] + "\n\n")
    summary = (
        r"20 tokens, \d+ drafted, tau \d\.\d\d, \d+\.\d tokens/s, finish reason: length, backend: native(, compiled)?\n"
    )
    assert re.fullmatch(summary, shown.removeprefix(expected["text"] + "\n\n"))


def test_compare_in_a_terminal(generate: Run) -> None:
    result = generate("hello", "--compare", terminal=True)
    assert result.code == 0
    assert "speed-up: " in result.out and "tokens: identical" in result.out


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
    engine: Any = SimpleNamespace(
        target=SimpleNamespace(tokenizer=tokenizer, running="native"),
        drafter=SimpleNamespace(parts=()),
        stream=lambda *_: iter(chunks),
    )
    out = Stream(terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    answers.stream_answer(display.terminal(), engine, "", SamplingParams())
    answer, summary = out.text().split("\n\n")
    green, end = "\x1b[32m", "\x1b[0m"
    assert answer == f"a{green}\t{end}{green}ö{end}{green}[{end}b{green}]{end}\N{REPLACEMENT CHARACTER}"
    assert ESCAPES.sub("", summary).startswith("9 tokens, 5 drafted, tau 2.67, ")


def test_prompt_from_standard_input(generate: Run, expected: dict[str, Any]) -> None:
    assert generate(stdin=b"hello\n").out == expected["text"] + "\n"
    assert generate("-", stdin=b"hello").out == expected["text"] + "\n"


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
        (["hello", "--temperature", "-1"], "--temperature is -1.0"),
        (["hello", "--temperature", "nan"], "--temperature is nan"),
        (["hello", "--top-p", "0"], "--top-p is 0.0"),
        (["hello", "--top-k", "-1"], "--top-k is -1"),
        (["hello", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["hello", "--max-new-tokens", "250"], "the target's context of 256"),
        (["hello", "--block-size", "9"], "block-size must be at most 8 for this drafter, got 9"),
        (["hello", "--block-size", "0"], "--block-size is 0"),
        (["hello", "--draft-window", "0"], "--draft-window is 0; it must be at least 1"),
        (["hello", "--compare", "--sampled", "--temperature", "1"], "--compare and --sampled exclude each other"),
        (["hello", "--block-size", "many"], "--block-size must be a whole number or 'auto', got 'many'"),
        (["hello", "--tree-budget", "-1"], "--tree-budget is -1"),
        (["hello", "--tree-budget", "1.5"], "--tree-budget must be a whole number or 'auto', got '1.5'"),
        (["hello", "--dtype", "int8"], "--dtype is 'int8'"),
        (["hello", "--device", "abacus"], "abacus"),
        (["hello", "--seed", str(2**64)], ""),
        (["hello", "--target", "/no/such/folder"], "/no/such/folder"),
        (["hello", "--drafter", "/no/such/folder"], "/no/such/folder is no drafter"),
        (["hello", "--drafter", "nonesuch"], "nonesuch is no drafter"),
        ([""], "The prompt is empty"),
        (["hello", "--batch-size", "0"], "--batch-size must be at least 1, got '0'"),
        ([" \n"], "The prompt is empty"),
        ([], "The prompt is empty"),
        (["a" * 300], "shorten the prompt"),
        (["\udcff"], "The prompt is not valid UTF-8 text"),
    ],
)
def test_bad_input(generate: Run, args: list[str], message: str) -> None:
    refused(generate(*args), message)


# Of the settings, the drafter and the prompt.
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["hello", "--top-p", "0"], "--top-p is 0.0"),
        (["hello", "--block-size", "9"], "block-size must be at most 8 for this drafter, got 9"),
        (["a" * 300], "shorten the prompt"),
    ],
)
def test_bad_input_is_refused_alike_however_the_answer_is_shown(generate: Run, args: list[str], message: str) -> None:
    for extra in ("--json", "--compare"):
        refused(generate(*args, extra), message)
    refused(generate(*args, terminal=True), message)


def test_undecodable_standard_input(generate: Run) -> None:
    refused(generate(stdin=b"caf\xe9"), "Standard input is not utf-8 text")


def test_no_prompt_at_a_terminal(generate: Run) -> None:
    refused(generate(stdin_terminal=True), "There is no prompt")


def test_drafters_that_go_by_their_names_are_in_the_help(run: Run, tiny_target_dir: Path) -> None:
    words = " ".join(re.sub(r"[│\s]+", " ", ESCAPES.sub("", run("generate", "--help-all").out)).split())
    with pytest.raises(ValueError, match="names") as refusal:
        load_drafter("nonesuch", target=load_target(tiny_target_dir))
    names = str(refusal.value).partition("one of the names ")[2].removesuffix(".").split(", ")
    assert len(names) >= 2 and all(f"{name} (" in words for name in names)


def test_target_without_drafter(run: Run, tiny_target_dir: Path) -> None:
    result = run("generate", "hello", "--target", tiny_target_dir, "--max-new-tokens", 4, "--seed", 1)
    assert result.code == 0 and "lookup drafts" in result.err


def test_corrupt_weights(generate: Run, tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    for option, folder in (("--target", tiny_target_dir), ("--drafter", tiny_drafter_dir)):
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        refused(generate("hello", option, copy), str(copy))


def test_drafter_of_another_target(generate: Run, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "drafter"
    shutil.copytree(tiny_drafter_dir, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_target_layers": 7}))
    refused(generate("hello", "--drafter", copy), "7")


def test_no_memory(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    refused(generate("hello"), "ask for fewer new tokens")


def test_unknown_option(generate: Run) -> None:
    result = generate("hello", "--warp", 9)
    assert (result.code, result.out) == (2, "")
    assert "--warp" in ESCAPES.sub("", result.err)


def test_ctrl_c(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    assert generate("hello") == Result(130, "", "")


def test_help_takes_texts_and_defaults_from_the_parameters(run: Run) -> None:
    result = run("generate", "--help-all")
    words = " ".join(re.sub(r"[│\s]+", " ", ESCAPES.sub("", result.out)).split())
    assert result.code == 0
    assert f"[default: {SamplingParams().max_new_tokens}]" in words
    for name in (
        "max-new-tokens",
        "temperature",
        "top-k",
        "top-p",
        "seed",
        "block-size",
        "tree-budget",
        "draft-window",
    ):
        assert f"--{name}" in words
    assert "Divisor of the logits, 1e-30 to 1e30; 0 decodes greedily." in words
    assert "None" not in words


def test_version(run: Run) -> None:
    assert re.fullmatch(r"blockdraft \d+\.\d+\.\d+\S*\n", run("--version").out)


def test_the_command_line_starts_without_torch() -> None:
    code = "import blockdraft.cli, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_decoding_natively_imports_no_code_of_models_nor_what_torch_compiles_with() -> None:
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy", "transformers.modeling_utils"}
    code = "import sys; from blockdraft import Engine, SamplingParams, load_drafter, load_target\n"
    code += "target = load_target(backend='native'); engine = Engine(target, load_drafter(target=target))\n"
    code += "engine.generate(['Hi'], SamplingParams(4))\n"
    code += f"print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def refused(result: Result, message: str) -> None:
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


def test_what_does_not_go_with_a_file_of_prompts(generate: Run, tmp_path: Path) -> None:
    for other in ("hello", "--compare"):
        result = generate("--prompts", tmp_path / "prompts.jsonl", other)
        assert result.code == 2 and "exclude each other" in result.err
    assert "cannot be read" in generate("--prompts", tmp_path / "absent.jsonl").err


def test_penalties_and_stops_shape_the_answer(generate: Run, expected: dict[str, Any]) -> None:
    assert generate("hello", "--repetition-penalty", 3).out != generate("hello").out
    text = expected["text"]
    cut = generate("hello", "--stop", text[5:8], "--stop", "no such text").out.removesuffix("\n")
    assert text.startswith(cut) and len(cut) < len(text) and text[5:8] not in cut
    assert "--min-p is 2.0" in generate("hello", "--min-p", 2).err


def test_a_terminal_shows_what_a_pipe_gets_up_to_a_stop_string(generate: Run, expected: dict[str, Any]) -> None:
    stop = expected["text"][5:8]
    answer = generate("hello", "--stop", stop).out.removesuffix("\n")
    assert stop not in answer
    shown = ESCAPES.sub("", generate("hello", "--stop", stop, terminal=True).out)
    assert shown.startswith(answer + "\n\n") and "finish reason: stop" in shown


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("failure", [NumbersError("no numbers"), RequestError("the tokenizer failed")])
def test_a_request_that_fails_ends_with_its_error(
    generate: Run, monkeypatch: pytest.MonkeyPatch, failure: BlockdraftError, terminal: bool
) -> None:
    extend = Request.extend

    def failing(self: Request, *args: Any) -> int:
        taken = extend(self, *args)
        self.fail(failure)
        return taken

    monkeypatch.setattr(Request, "extend", failing)
    result = generate("hello", terminal=terminal)
    assert (result.code, result.err) == (1, f"error: {failure}\n")


def test_a_language_model_drafts_ahead(generate: Run, expected: dict[str, Any], tiny_target_dir: Path) -> None:
    model = ("--drafter", tiny_target_dir, "--block-size", 4)
    ahead = generate("hello", *model, "--drafter-device", "cpu", "--draft-ahead", 2)
    assert (ahead.code, ahead.out) == (0, expected["text"] + "\n")
    assert re.search(r"Drafted ahead: \d+ of \d+ outcomes were foreseen \(\d+%\)\.", ahead.err)
    refused = generate("hello", *model, "--draft-ahead", 2)
    assert refused.code == 2 and refused.err.startswith("error: ahead is 2, and the draft model would share")
