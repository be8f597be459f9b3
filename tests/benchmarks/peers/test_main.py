"""The whole command, with fake peers."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from benchmarks.peers import __main__ as program
from benchmarks.peers import environments
from benchmarks.peers.registry import LLAMA, PEERS, PLAIN, REFERENCE, Peer, choose
from fakes import fake

from blockdraft_tools.export import gguf_source


@pytest.fixture
def command(tmp_path: Path, tiny_target_dir: Path, constants: Callable[..., None]) -> list[str]:
    """Command for fake peers, whose answers begin with the first token of the prompt, set by the chat template."""
    constants(program, BUILD=tmp_path / "build", UNFINISHED=tmp_path / "build" / "unfinished")
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text('{"prompt": "1 + 1"}\n{"prompt": "2 + 2"}\n')
    folders = ["--target", str(tiny_target_dir), "--drafter", str(tmp_path)]
    return [*folders, "--prompts", str(prompts), "--max-new-tokens", "5", "--out", str(tmp_path / "out")]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt the test, also where the shell has it ignored, as in commands in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(arguments: list[str], *peers: Peer, code: int = 0) -> None:
    if code:
        with pytest.raises(SystemExit, match=str(code)):
            program.main(arguments, peers)
    else:
        program.main(arguments, peers)


def test_one_command_measures_and_writes(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = fake(REFERENCE), fake("a", differ=1), fake("b", missing="no | wheel"), fake("c", die=1), fake(PLAIN, many=1)
    run([*command, "--repeats", "2", "--at-once", "16"], *peers)
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert set(found["sets"]["sums"]) == {REFERENCE, "a", PLAIN}
    assert found["missing"] == {"b": "no | wheel", "c": "failed: it ended with 1: out of memory"}
    assert [(one["peer"], one["place"], one["margin"]) for one in found["differences"]] == [("a", 3, 0.25)] * 2
    assert found["settings"]["prompts"] == {"sums": 2} and found["repetitive"] == {"sums": 0}
    assert found["at_once"] == {PLAIN: 160}  # 16 answers of 5 tokens in half a second
    assert min(found["start_seconds"].values()) > 0 and found["peak_bytes"][PLAIN] > 1 << 20
    printed = capsys.readouterr().out
    assert f"a, c, {PLAIN}: fake 1.0" in printed and f"Date: {date.today()}" in printed
    [line] = [line for line in printed.splitlines() if line.startswith(f"| {PLAIN} |") and line.endswith("| 160 |")]
    for file in ("peers.json", "peers.md"):
        assert str(tmp_path) not in (tmp_path / "out" / file).read_text()
    assert (tmp_path / "out" / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "build" / "unfinished").exists()


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"missing": "no wheel"}, [], "Without transformers there is nothing to compare with: no wheel"),
        ({}, ["--max-new-tokens", "250"], "Prompt 1 of sums has"),
    ],
)
def test_what_cannot_be_compared(
    options: dict[str, str],
    more: list[str],
    message: str,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*command, *more], fake(REFERENCE, **options), fake("a"))
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_an_interrupt_keeps_the_answers(command: list[str], ctrl_c: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(command, fake(REFERENCE, interrupt="decode"))
    assert ended.value.code == 130 and "goes on from here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run([*command, "--repeats", "2"], fake(REFERENCE))
    assert "other repeats; finish it with what it began with, or add --restart" in capsys.readouterr().err
    run([*command, "--repeats", "5"], fake(REFERENCE))  # the default written out


def test_memory_and_start_are_those_of_the_process_that_answered(
    command: list[str], ctrl_c: None, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        run([*command, "--at-once", "2"], fake(REFERENCE, many=1, interrupt="decode_many"))
    file = tmp_path / "build" / "unfinished" / "processes.csv"
    [peer, seconds, peak] = file.read_text().splitlines()[1].split(",")
    run([*command, "--at-once", "2"], fake(REFERENCE, many=1))
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert found["start_seconds"] == {peer: float(seconds)} and found["peak_bytes"] == {peer: int(peak)}


def test_the_bundled_prompts_are_read_by_default() -> None:
    args = program.arguments([])
    assert args.repeats == 5 and args.dtype == "float32"
    tasks = program.read_tasks(args, program.load_target_text(args.target))
    assert len(tasks) >= 5 and {task.prompt_set for task in tasks} == {"prompts"}


def test_peers_have_names_adapters_and_environments(tmp_path: Path, constants: Callable[..., None]) -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS) and not [peer for peer in PEERS if "," in peer.name]
    for peer in PEERS:
        assert Path(peer.command()[1]).is_file()
        assert peer.is_ours or peer.environment in environments.INSTALLERS | environments.MORE
    constants(environments, BUILD=tmp_path)
    reasons = {peer.name: peer.why_missing() for peer in PEERS}
    assert reasons["vllm"] == "not installed; run `make bench-engines`"
    assert reasons["dflash"] == "not installed; run `make bench-peers`" and reasons[PLAIN] is None


def test_models_of_other_formats_are_written_before_the_start_is_timed(command: list[str], tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    run([*command, "--repeats", "1"], fake(REFERENCE), replace(fake("a", starts=str(starts)), converts=True))
    assert len(starts.read_text().splitlines()) == 2


def test_a_drafter_gives_its_kind_to_the_names_of_peers(tiny_drafter_dir: Path, tiny_eagle3_dir: Path) -> None:
    assert program.kind_of(tiny_drafter_dir) == "dflash" and program.kind_of(tiny_eagle3_dir) == "eagle3"
    found = {peer.name: peer.options for peer in choose(["llama.cpp draft-dflash:7", "vllm dflash"], "eagle3")}
    assert found["llama.cpp draft-eagle3:7"] == {"speculator": "draft-eagle3", "draft": "drafter", "draft_tokens": 7}
    assert found["vllm eagle3"] == {"drafts": True}


def test_some_peers_come_with_what_they_are_compared_to() -> None:
    assert choose(None) == list(PEERS)
    assert [peer.name for peer in choose(["ours dflash", "dflash"])] == [REFERENCE, "dflash", PLAIN, "ours dflash"]
    with pytest.raises(ValueError, match="Peer 'tgi' is unknown, or does not run these models; there are: dflash, "):
        choose(["tgi"])


def test_peers_of_gguf_files() -> None:
    plain = [peer.name for peer in choose(None, None, files=True)]
    assert plain == [LLAMA, "llama.cpp ngram-simple", "llama.cpp ngram-cache", PLAIN]
    drafted = [peer.name for peer in choose(None, "eagle3", files=True)]
    assert {*plain, "llama.cpp draft-eagle3:3", "ours eagle3", "ours lookup+eagle3", "ours ddtree"} <= {*drafted}
    assert not {REFERENCE, "ours int4", "ours plain (hf)", "llama.cpp draft-simple"} & {*drafted}
    with pytest.raises(ValueError, match="'ours dflash' is unknown, or does not run these models"):
        choose(["ours dflash"], None, files=True)


def test_a_gguf_file_is_compared_with_llama_cpp(
    command: list[str],
    tmp_path: Path,
    tiny_target_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "model.gguf"
    with gguf_source(tiny_target_dir) as source:
        source.write_target(file, "f32")
    run([*command, "--repeats", "1", "--target", str(file)], code=2)
    assert "must both be GGUF files" in capsys.readouterr().err
    at = command.index("--drafter")
    run([*command[:at], *command[at + 2 :], "--target", str(file)], fake(LLAMA), fake(PLAIN, differ=1))
    printed = capsys.readouterr().out
    assert (
        "x llama.cpp" in printed
        and "cpu, as in the file" in printed
        and "Drafter: none" in printed
        and "transformers" not in printed
    )
