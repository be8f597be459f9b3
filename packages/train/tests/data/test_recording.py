"""Recording of served conversations: training reads them, and no failure of the disk reaches an answer."""

import errno
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from queue import Queue

import forked
import pytest
import torch
from safetensors.torch import load_file

from blockdraft.drafters import load_drafter
from blockdraft.engine import Chunk, Engine, Request
from blockdraft.targets import Target, load_target
from blockdraft.types import MIN_RECORD_BYTES, Drafting, SamplingParams
from blockdraft_train.data import record_folder, recording
from blockdraft_train.data.documents import read_data
from blockdraft_train.data.hidden_states import read_hidden_states
from blockdraft_train.data.record_folder import RecordFolder, sampling_of
from blockdraft_train.data.recording import ConversationRecorder, rejected_counts
from blockdraft_train.data.target_layers import target_hidden_states

LAYERS = (0, 2)
PARAMS = SamplingParams(12, ignore_eos=True)
PROMPT = [5, 9, 17, 4]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, backend="native")


@pytest.fixture
def make_recorder(target: Target, tmp_path: Path) -> Iterator[Callable[..., ConversationRecorder]]:
    """Return a function that makes a recorder for a folder, which is closed at the end."""
    made = list[ConversationRecorder]()

    def make(layers: tuple[int, ...] = (), limit: int = 2**26, name: str = "record") -> ConversationRecorder:
        made.append(ConversationRecorder(tmp_path / name, target, layers, limit))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


def finished(tokens: list[int], answer: list[int], **params: float) -> Request:
    request = Request(prompt=tokens, params=SamplingParams(**params))  # type: ignore[arg-type]
    request.token_ids, request.drafted, request.finish_reason = answer, [False] * len(answer), "stop"
    return request


def test_documents_are_the_conversations_with_their_hidden_states(
    target: Target, tiny_drafter_dir: Path, make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    """Several turns are one document, also where the prefix of a prompt was copied from a kept sequence."""
    layers = (*LAYERS, target.num_layers)
    recorder = make_recorder(layers)
    drafter = load_drafter(tiny_drafter_dir, target=target)
    drafting, long = Drafting(block_size=4), [*range(3, 40)]
    with Engine(target, drafter, 2, drafting, prefix_tokens=512, recorder=recorder) as engine:
        first, other = engine.generate([long, PROMPT], PARAMS)
        second = engine.generate([[*long, *first.token_ids, 8, 30]], PARAMS)[0]
        assert second.stats.remembered >= 32
    recorder.close()
    data = read_data(tmp_path / "record")
    longer = [*long, *first.token_ids, 8, 30, *second.token_ids]
    tokens = [document.tokens.tolist() for document in data]
    assert sorted(tokens, key=len) == [[*PROMPT, *other.token_ids], longer]
    document = data[tokens.index(longer)]
    written = [False] * 37 + [True] * 12 + [False] * 2 + [True] * 12
    assert document.supervised.tolist() == written
    hidden_states = read_hidden_states(tmp_path / "record" / "hidden-states")
    hidden_states.check(target, data, layers)
    for index, known in enumerate(data):
        expected = target_hidden_states(target, layers, [known.tokens])[0].bfloat16()
        assert len(hidden_states[index]) == len(known.tokens)
        torch.testing.assert_close(hidden_states[index][:-1], expected[:-1], atol=0.02, rtol=0.02)


def test_what_was_drafted_rejected_and_sampled_is_recorded(
    target: Target, tiny_drafter_dir: Path, make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    recorder = make_recorder()
    drafter = load_drafter(tiny_drafter_dir, target=target)
    params = SamplingParams(20, temperature=0.7, seed=3, ignore_eos=True, lookup_scope="127.0.0.1 key")
    with Engine(target, drafter, drafting=Drafting(block_size=4), recorder=recorder) as engine:
        completion = engine.generate([PROMPT], params)[0]
    recorder.close()
    path = tmp_path / "record" / "tokens-00000.safetensors"
    shard = load_file(path)
    assert shard["drafted"].tolist() == [False] * 4 + completion.drafted
    rejected = sum(completion.stats.drafted) - sum(completion.drafted)
    assert 0 < rejected == int(shard["rejected"].sum())
    assert sampling_of(path)[0][0] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 3,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert all(b"127.0.0.1" not in file.read_bytes() for file in (tmp_path / "record").rglob("*") if file.is_file())


def test_rejected_draft_tokens_are_counted_where_their_step_ended() -> None:
    request = finished(PROMPT, [1, 2, 3, 4, 5, 6])
    request.drafted = [False, True, True, False, False, True]
    request.stats.committed, request.stats.drafted = [3, 1, 1], [4, 3, 1]
    assert rejected_counts(request) == [0, 0, 0, 2, 3, 0]


def cancel_first(submitted: Queue[Request], complete: bool, chunk: Chunk) -> None:
    """Cancel a request at its first chunk, in the engine's thread."""
    if chunk.finish_reason is None:
        request = submitted.get(timeout=10)
        request.cancel(complete)
        submitted.put(request)


def test_declined_failed_and_cut_off_requests_are_not_recorded(
    target: Target, make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    recorder, requests = make_recorder(), dict[bool, Request]()
    with Engine(target, recorder=recorder) as engine:
        for complete in (False, True):
            submitted = Queue[Request]()
            listener = partial(cancel_first, submitted, complete)
            requests[complete] = engine.submit(PROMPT, SamplingParams(200, ignore_eos=True), listener)
            submitted.put(requests[complete])
            assert requests[complete].result(10).finish_reason == "cancelled"
        engine.submit([8, 30], PARAMS, recorded=False).result()
    recorder.close()
    documents = [document.tokens.tolist() for document in read_data(tmp_path / "record")]
    assert documents == [[*PROMPT, *requests[True].token_ids]]


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_the_limit_deletes_the_oldest(
    target: Target,
    make_recorder: Callable[..., ConversationRecorder],
    tmp_path: Path,
    layers: tuple[int, ...],
    constants: Callable[..., None],
) -> None:
    constants(recording, TURN_SECONDS=-1.0)  # each conversation ends with its first turn
    recorder = make_recorder(layers, limit=MIN_RECORD_BYTES)
    count, length = (20, 9000) if not layers else (40, 1000)
    for number in range(count):
        prompt = [number + 3] * length
        states = torch.full((length + 2, recorder.folder.width), float(number), dtype=torch.bfloat16)
        recorder.write(recorder.turn(finished(prompt, [1, 2, 3]), states if layers else None))
    recorder.close()
    folder = tmp_path / "record"
    data = read_data(folder)
    kept = [int(document.tokens[0]) - 3 for document in data]
    assert kept == list(range(kept[0], count)) and 2 < len(kept) < count
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= MIN_RECORD_BYTES
    if layers:
        hidden_states = read_hidden_states(folder / "hidden-states")
        hidden_states.check(target, data, layers)
        assert [int(hidden_states[i][0, 0]) for i in range(len(data))] == kept
    again = make_recorder(layers, limit=MIN_RECORD_BYTES)  # goes on behind the last one
    again.write(again.turn(finished([2, 2], [1]), None if not layers else states[:2]))
    again.close()
    assert read_data(folder)[-1].tokens.tolist() == [2, 2, 1]


def test_a_full_disk_ends_the_recording_and_no_answer(
    target: Target,
    make_recorder: Callable[..., ConversationRecorder],
    full_disk: Callable[[], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    recorder = make_recorder()
    engine = Engine(target, recorder=recorder)
    with caplog.at_level(logging.WARNING), engine, full_disk():
        for _ in range(3):
            assert len(engine.generate([PROMPT], PARAMS)[0].checked().token_ids) == 12
            while recorder.failure is None:
                time.sleep(0.01)
    warnings = [record.message for record in caplog.records if "recorded any more" in record.message]
    assert len(warnings) == 1 and "No space left" in warnings[0]
    recorder.close()
    make_recorder().close()  # the folder can be used again


def test_a_recorder_that_raises_ends_no_request(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        target_layers = ()

        def record(self, request: Request, hidden_states: object) -> None:
            raise MemoryError

    with Engine(target, recorder=Broken()) as engine:
        assert len(engine.generate([PROMPT], PARAMS)[0].checked().token_ids) == 12
    assert "cannot be recorded" in caplog.text


def test_conversations_that_may_go_on_are_no_data_yet(
    make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    recorder = make_recorder()
    recorder.record(finished(PROMPT, [1, 2]), None)
    with pytest.raises(ValueError, match="holds no whole conversation yet: .* when the server ends"):
        read_data(tmp_path / "record")
    recorder.close()
    assert len(read_data(tmp_path / "record")) == 1


def test_a_folder_that_was_there_becomes_private(
    make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    """A mode that its owner sets later stays."""
    folder = tmp_path / "record"
    folder.mkdir(mode=0o755)
    make_recorder().close()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    make_recorder().close()
    assert folder.stat().st_mode & 0o777 == 0o750


def test_other_folders_are_refused(
    target: Target, tiny_target_dir: Path, make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    recorder = make_recorder()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}.*another folder for --record"):
        make_recorder()
    recorder.record(finished(PROMPT, [1, 2]), None)
    recorder.close()
    with pytest.raises(
        ValueError, match="recorded without hidden states, and not with hidden states of the target layers 0, 2"
    ):
        make_recorder(LAYERS)
    manifest = tmp_path / "record" / "data.json"
    theirs = json.loads(manifest.read_text())["target"]
    manifest.write_text(manifest.read_text().replace(theirs, "0123456789abcdef"))
    with pytest.raises(ValueError, match=r"another target \(fingerprint 0123456789abcdef\)"):
        make_recorder()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").touch()
    with pytest.raises(ValueError, match="holds other files"):
        make_recorder(name="files")
    with pytest.raises(ValueError, match="record_bytes must be at least"):
        make_recorder(limit=10, name="small")


def record_and_wait(folder: Path, target_dir: Path, ready: "multiprocessing.synchronize.Event") -> None:
    recorder = ConversationRecorder(folder, load_target(target_dir, backend="native"))
    for number in range(5):
        recorder.record(finished([number + 3] * 9, [1, 2]), None)
    while len(recorder.folder.left) < 5:
        time.sleep(0.01)
    ready.set()
    time.sleep(60)


@pytest.mark.slow
def test_a_killed_process_loses_no_finished_request(
    target: Target, tiny_target_dir: Path, make_recorder: Callable[..., ConversationRecorder], tmp_path: Path
) -> None:
    ready = forked.CONTEXT.Event()
    process = forked.process(record_and_wait, tmp_path / "record", tiny_target_dir, ready)
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    (tmp_path / "record" / "open" / ".000000005.safetensors.1.tmp").write_bytes(b"half a file")
    make_recorder().close()
    documents = [document.tokens.tolist() for document in read_data(tmp_path / "record")]
    assert documents == [[number + 3] * 9 + [1, 2] for number in range(5)]
    assert not list((tmp_path / "record" / "open").iterdir())


def test_a_process_killed_between_two_files_leaves_a_folder_that_can_be_read(
    target: Target, make_recorder: Callable[..., ConversationRecorder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the shard and before the manifest, or after the manifest and before the conversation's file is deleted."""
    folder, unlink = tmp_path / "record", Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == record_folder.OPEN and not path.name.startswith("."):
            raise OSError(errno.EIO, "killed")
        unlink(path, missing_ok)

    def killed(folder: RecordFolder) -> None:
        raise OSError(errno.EIO, "killed")

    for number, (owner, name, last) in enumerate(
        [(RecordFolder, "_write_manifests", killed), (Path, "unlink", refused)]
    ):
        recorder = make_recorder()
        recorder.record(finished([number + 3] * 9, [1]), None)
        while not recorder.folder.left:
            time.sleep(0.01)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, last)
            recorder.close()
        assert recorder.failure and recorder.folder.left
        assert number == 0 or [int(document.tokens[0]) for document in read_data(folder)] == [3, 4]
        make_recorder().close()
        assert [int(document.tokens[0]) for document in read_data(folder)] == [*range(3, 4 + number)]
