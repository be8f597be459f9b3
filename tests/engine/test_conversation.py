"""Answers of a chat are those of plain decoding of the same messages, whatever is in memory."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from thinned import thinned

from blockdraft.drafters import load_drafter
from blockdraft.engine import Chunk, ContextFull, Conversation, Engine, chat_engine
from blockdraft.engine.runner import Runner
from blockdraft.errors import UsageError
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams
from blockdraft_train.data.records import ChatRecord, read_records
from blockdraft_train.data.settings import RecordSettings

TEXTS = ["hello there, who are you?", "and what then?", "why"]
# Repeats only the end of an answer, as templates that drop the reasoning of earlier turns.
FORGETFUL = (
    "{% for message in messages %}{% set said = message['content'] %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (said[-5:] if message['role'] == 'assistant' else said) }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
STERN = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + FORGETFUL


@pytest.fixture
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture
def engine(target: Target, tiny_drafter_dir: Path) -> Iterator[Engine]:
    with chat_engine(target, load_drafter(tiny_drafter_dir, target=target), Drafting(block_size=4)) as engine:
        yield engine


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of prompt tokens that each call of the target has read."""
    counts: list[int] = []
    prefill = Runner.prefill

    def counting(self: Runner, rows: object, given: list[int]) -> list[int]:
        counts.extend(given)
        return prefill(self, rows, given)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "prefill", counting)
    return counts


def say(talk: Conversation, text: str, params: SamplingParams) -> list[int]:
    """Ask and keep, and compare with plain decoding; returns the tokens."""
    before = list(talk.messages)
    turn = talk.ask(text, params)
    completion = talk.keep(turn)
    target = talk.engine.target
    chat = [*before, {"role": "user", "content": text}]
    prompt = chat if talk.has_template else "".join(message["content"] for message in chat)
    [plain] = Engine(target, load_drafter("none", target=target)).generate([prompt], params)
    assert completion.token_ids == plain.token_ids
    return completion.token_ids


@pytest.mark.parametrize(("template", "temperature"), thinned(["plain", "forgetful", "none"], [0.0, 1.0], keep=2))
def test_answers_are_those_of_plain_decoding(engine: Engine, template: str, temperature: float) -> None:
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    if template != "plain":
        tokenizer.chat_template = FORGETFUL if template == "forgetful" else None
    talk, params = Conversation(engine), SamplingParams(max_new_tokens=20, temperature=temperature, seed=1)
    for text in TEXTS:
        say(talk, text, params)
    assert len(talk.messages) == 6 and talk.has_template == (template != "none")


@pytest.mark.parametrize("forgetful", [False, True])
def test_what_is_remembered_is_not_read(engine: Engine, counted: list[int], forgetful: bool) -> None:
    assert engine.target.tokenizer is not None
    if forgetful:
        engine.target.tokenizer.chat_template = FORGETFUL
    talk, params = Conversation(engine), SamplingParams(max_new_tokens=20)
    remembered = []
    for text in TEXTS:
        counted.clear()
        turn = talk.ask(text, params)
        completion = talk.keep(turn)
        assert sum(counted) == completion.prompt_tokens - completion.stats.remembered
        remembered.append(completion.stats.remembered)
    assert remembered[0] == 0 < remembered[1] < remembered[2]


def test_room_stays_for_what_is_remembered(engine: Engine, counted: list[int]) -> None:
    """In random conversations the count of remembered tokens is right, and they are never evicted."""
    talk, chooser = Conversation(engine), random.Random(1)
    for _ in range(25):
        step = chooser.random()
        if step < 0.2:
            talk.undo()
        elif step < 0.3:
            talk.forget_oldest()
        counted.clear()
        try:
            turn = talk.ask("x" * chooser.randint(1, 60), SamplingParams(max_new_tokens=chooser.randint(1, 100)))
        except ContextFull:
            talk.reset()
            continue
        completion = talk.keep(turn)
        assert sum(counted) == completion.prompt_tokens - completion.stats.remembered


def test_a_full_context_cuts_the_answer_and_then_refuses(engine: Engine) -> None:
    talk, params = Conversation(engine), SamplingParams(max_new_tokens=1000, ignore_eos=True)
    completion = talk.keep(talk.ask("x" * 100, params))
    assert completion.finish_reason == "length"
    assert completion.prompt_tokens + len(completion.token_ids) == talk.limit == 256
    said = list(talk.messages)
    with pytest.raises(ContextFull, match="there is room for 256"):
        talk.ask("more", params)
    assert talk.messages == said
    assert talk.forget_oldest() == "x" * 100
    assert talk.keep(talk.ask("more", params)).token_ids


def test_memory_may_leave_less_room_than_the_context(target: Target, tiny_drafter_dir: Path) -> None:
    with Engine(target, load_drafter(tiny_drafter_dir, target=target), cache_tokens=100) as engine:
        talk = Conversation(engine)
        assert talk.limit < 100
        completion = talk.keep(talk.ask("hello", SamplingParams(max_new_tokens=1000, ignore_eos=True)))
        assert completion.prompt_tokens + len(completion.token_ids) == talk.limit


def test_undo_drop_and_reset(engine: Engine) -> None:
    talk, params = Conversation(engine, "be kind"), SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert talk.undo() is None and talk.forget_oldest() is None
    for text in TEXTS:
        talk.keep(talk.ask(text, params))
    assert talk.undo() == TEXTS[2] and talk.forget_oldest() == TEXTS[0]
    assert [message["content"] for message in talk.messages][:2] == ["be kind", TEXTS[1]] and len(talk.messages) == 3
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be kind"}]
    talk.set_system("")
    assert talk.messages == []


def test_a_system_message_shapes_the_answer_and_keeps_what_was_said(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=20)
    talk = Conversation(engine)
    without = say(talk, TEXTS[0], params)
    talk.set_system("be brief")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.undo()
    assert say(talk, TEXTS[0], params) != without


def test_a_system_message_that_the_template_refuses_changes_nothing(engine: Engine) -> None:
    assert engine.target.tokenizer is not None
    engine.target.tokenizer.chat_template = STERN
    talk = Conversation(engine)
    with pytest.raises(UsageError, match="no system"):
        talk.set_system("be brief")
    assert talk.messages == []
    engine.target.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        Conversation(engine, "be brief")


def test_a_cancelled_answer_counts_as_far_as_it_came(engine: Engine) -> None:
    talk = Conversation(engine)
    asked = Event()

    def cancel(chunk: Chunk) -> None:
        asked.wait(60)
        turn.request.cancel()

    turn = talk.ask("hello", SamplingParams(max_new_tokens=200, ignore_eos=True), cancel)
    asked.set()
    completion = talk.keep(turn)
    assert completion.finish_reason == "cancelled" and 0 < len(completion.token_ids) < 200
    assert talk.messages[-1]["content"] == completion.text
    say(talk, "and then?", SamplingParams(max_new_tokens=20))


def test_a_message_without_answer_is_not_kept(engine: Engine) -> None:
    talk = Conversation(engine)
    turn = talk.ask("hello", SamplingParams(max_new_tokens=1, logit_bias={engine.target.tokenizer.eos_token_id: 100}))  # type: ignore[union-attr]
    assert talk.keep(turn).text == "" and talk.messages == []


@pytest.mark.parametrize("has_template", [True, False])
def test_what_is_saved_is_read_as_data(engine: Engine, tmp_path: Path, has_template: bool) -> None:
    assert engine.target.tokenizer is not None
    if not has_template:
        engine.target.tokenizer.chat_template = None
    talk, params, file = (
        Conversation(engine),
        SamplingParams(max_new_tokens=5, ignore_eos=True),
        tmp_path / "chat.jsonl",
    )
    with pytest.raises(UsageError, match="nothing to save"):
        talk.save(file)
    for text in TEXTS[:2]:  # the same file twice
        talk.keep(talk.ask(text, params))
        talk.save(file)
    [(_, row)] = read_records([str(file)], RecordSettings())
    assert row == (
        ChatRecord(talk.messages) if has_template else "".join(message["content"] for message in talk.messages)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["chat.jsonl"]
    other = tmp_path / "other.jsonl"
    other.write_text("{}")
    with pytest.raises(UsageError, match="exists; give another name"):
        talk.save(other)
    assert json.loads(other.read_text()) == {}
    with pytest.raises(UsageError, match="cannot be written"):
        talk.save(tmp_path / "absent" / "chat.jsonl")


def test_without_tokenizer(target: Target, tiny_drafter_dir: Path) -> None:
    target.tokenizer = None  # type: ignore[misc]
    with (
        chat_engine(target, load_drafter(tiny_drafter_dir, target=target)) as engine,
        pytest.raises(UsageError, match="no tokenizer"),
    ):
        Conversation(engine)
