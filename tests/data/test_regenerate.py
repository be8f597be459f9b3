"""Responses written anew by a tiny random model, in our engine and by a server."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from blockdraft.data import regenerate, responders
from blockdraft.data.chats import ChatEncoder
from blockdraft.data.documents import TokenData, read_data
from blockdraft.data.prepare import Preparation
from blockdraft.data.regenerate import Conversation, loops_note, prompts_of
from blockdraft.data.responders import CHECKED_TOKENS, EngineResponder, Responder, Response, ServerResponder
from blockdraft.data.settings import DataSettings, RecordSettings
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import Target, load_target
from blockdraft.types import SamplingParams

SAMPLED = DataSettings(
    writer="target", author="x", sampling=SamplingParams(24, temperature=1.0, seed=5), batch_size=3, length=200
)
ONE_TURN = [{"prompt": f"say {i}", "response": "never read"} for i in range(7)]
TWO_TURNS = [{"turns": [f"say {i}", "again"]} for i in range(6)]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return load_target(tiny_target_dir, device="cpu")


@pytest.fixture(scope="module")
def ending(tiny_target_dir: Path) -> Target:
    """Target that ends its answers at one in ten tokens; a random one would hardly ever."""
    target = load_target(tiny_target_dir, device="cpu")
    target.eos_token_ids = frozenset({2, *range(10, target.vocab_size, 10)})
    return target


def prepared(folder: Path, target: Target, rows: list[dict[str, Any]], settings: DataSettings) -> Preparation:
    source = folder.parent / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Preparation(folder, target, [str(source)], RecordSettings(), settings)


def engine(target: Target, drafter: str | Path = "none") -> EngineResponder:
    return EngineResponder(Engine(target, load_drafter(drafter, target=target), max_batch_size=3))


def contents(data: TokenData) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and the response of each document."""
    pairs = []
    for document in data:
        at = document.supervised.long().argmax()
        assert document.supervised[at:].all()
        pairs.append((document.tokens[:at].tolist(), document.tokens[at:].tolist()))
    return pairs


def chat_ids(target: Target, *messages: str) -> list[int]:
    assert target.tokenizer is not None
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    return list(target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def test_generated_ids_are_kept(tmp_path: Path, ending: Target) -> None:
    manifest = prepared(tmp_path / "a", ending, ONE_TURN, SAMPLED).run(engine(ending))
    results = contents(read_data(tmp_path / "a"))
    prompts = [chat_ids(ending, f"say {i}") for i in range(7)]
    assert [prompt for prompt, _ in results] == prompts
    ended = 0
    for row, (prompt, answer) in enumerate(results):
        seed = ((5 * 1_000_003 + row) * 1_009 + 1) % 2**31
        [completion] = Engine(ending, load_drafter("none", target=ending)).generate(
            [prompt], SamplingParams(24, temperature=1.0, seed=seed)
        )
        assert answer == completion.token_ids  # an end token only where the target wrote it
        ended += answer[-1] in ending.eos_token_ids
    assert 0 < sum(len(answer) < 24 for _, answer in results) <= ended
    assert manifest["written_by"] == {
        "writer": "target",
        "author": "x",
        "mode": "sampled",
        "max_new_tokens": 24,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 5,
    }


def test_a_drafter_changes_nothing(tmp_path: Path, target: Target, tiny_drafter_dir: Path) -> None:
    plain, drafted = (
        prepared(tmp_path / Path(drafter).name, target, ONE_TURN, SAMPLED).run(engine(target, drafter))
        for drafter in ("none", tiny_drafter_dir)
    )
    assert plain["fingerprint"] == drafted["fingerprint"]


def test_an_interrupted_run_answers_only_what_is_missing(tmp_path: Path, target: Target) -> None:
    whole = prepared(tmp_path / "whole", target, ONE_TURN, SAMPLED).run(engine(target))

    def stop(stage: str, done: int, total: int) -> None:
        assert total == 7
        if done == 3:
            raise KeyboardInterrupt

    first = prepared(tmp_path / "parts", target, ONE_TURN, SAMPLED)
    with pytest.raises(KeyboardInterrupt):
        first.run(engine(target), stop)
    second = prepared(tmp_path / "parts", target, ONE_TURN, SAMPLED)
    assert (second.total, second.missing) == (7, 4)
    asked = spied(engine(target))
    assert second.run(asked)["fingerprint"] == whole["fingerprint"]
    assert len(asked.keys) == 4 and set(asked.keys) | first.writer.done == set(range(7))
    # Finished, there is nothing left to do, unless further rows have been put behind.
    assert prepared(tmp_path / "parts", target, ONE_TURN, SAMPLED).run(None)["fingerprint"] == whole["fingerprint"]
    longer = prepared(tmp_path / "parts", target, [*ONE_TURN, {"prompt": "more"}], SAMPLED)
    assert longer.missing == 1
    assert longer.run(engine(target))["counts"]["rows"] == 8


class Spy:
    def __init__(self, inner: Responder) -> None:
        self.inner, self.at_once, self.keys = inner, inner.at_once, list[int]()
        self.responses, self.close = inner.responses, inner.close

    def submit(self, key: int, *rest: Any) -> None:
        self.keys.append(key)
        self.inner.submit(key, *rest)


def spied(inner: Responder) -> Spy:
    return Spy(inner)


def test_later_turns_see_the_answers_before(tmp_path: Path, ending: Target) -> None:
    prepared(tmp_path / "a", ending, TWO_TURNS, SAMPLED).run(engine(ending))
    assert ending.tokenizer is not None
    results = contents(read_data(tmp_path / "a"))
    prompts = [chat_ids(ending, f"say {row}") for row in range(6)]
    row, first, later = 0, list[int](), 0
    for prompt, answer in results:
        if "again" in ending.tokenizer.decode(prompt):
            later += 1
            said = [token for token in first if token not in ending.eos_token_ids]
            text = ending.tokenizer.decode(said, skip_special_tokens=True)
            assert prompt == chat_ids(ending, f"say {row}", text, "again")
        else:
            row, first = prompts.index(prompt), answer
    assert later


def test_turns_share_a_document_where_their_tokens_go_on(target: Target) -> None:
    assert target.tokenizer is not None
    encoder = ChatEncoder(target.tokenizer, target.eos_token_ids)
    end = next(iter(target.eos_token_ids))
    plain = target.tokenizer("the end")["input_ids"]
    odd = [*(target.tokenizer(letter)["input_ids"][0] for letter in "the"), *target.tokenizer(" end")["input_ids"]]
    assert target.tokenizer.decode(odd) == "the end" and odd != plain
    for ids, count in ((plain, 1), (odd, 2)):
        chat = Conversation([[{"role": "user", "content": "q"}], [{"role": "user", "content": "r"}]], encoder, 200)
        assert chat.next_prompt() == chat_ids(target, "q")
        chat.take(Response("the end", [*ids, end], ended=True))
        second = chat.next_prompt()
        assert second == chat_ids(target, "q", "the end", "r")
        chat.take(Response("bye", [5, 6], ended=False))
        assert chat.next_prompt() is None
        assert len(chat.documents) == count
        last = chat.documents[-1]
        assert last.tokens.tolist() == [*second, 5, 6] and last.supervised.tolist()[-2:] == [True, True]
        first_answer = chat.documents[0].supervised.nonzero().flatten().tolist()
        begin = len(chat_ids(target, "q"))
        expected = list(range(begin, begin + len(ids) + 1))
        assert first_answer[: len(expected)] == expected
        assert chat.documents[0].tokens[begin : begin + len(ids) + 1].tolist() == [*ids, end]
        assert int(sum(document.supervised.sum() for document in chat.documents)) == len(ids) + 3


def test_nobody_goes_on_behind_half_an_answer(target: Target) -> None:
    assert target.tokenizer is not None
    encoder = ChatEncoder(target.tokenizer, target.eos_token_ids)
    chat = Conversation([[{"role": "user", "content": "q"}], [{"role": "user", "content": "r"}]], encoder, 200)
    chat.next_prompt()
    chat.take(Response("half", [5, 6], ended=False))
    assert chat.next_prompt() is None
    assert [document.tokens.tolist() for document in chat.documents] == [[*chat_ids(target, "q"), 5, 6]]


def test_answers_are_cut_at_the_length(tmp_path: Path, target: Target) -> None:
    prompt = chat_ids(target, "say 0")
    settings = DataSettings(writer="target", sampling=SamplingParams(50, 1.0, seed=5), length=len(prompt) + 4)
    prepared(tmp_path / "a", target, ONE_TURN, settings).run(engine(target))
    data = read_data(tmp_path / "a")
    assert max(data.lengths) == len(prompt) + 4 and not any(
        document.cut for document in data
    )  # nothing written in vain


def test_what_comes_before_each_answer() -> None:
    def chat(roles: str) -> list[dict[str, str]]:
        names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        return [{"role": names[letter], "content": str(i)} for i, letter in enumerate(roles)]

    def parts(roles: str) -> list[str]:
        return ["".join(message["role"][0] for message in part) for part in prompts_of(chat(roles))]

    assert parts("sua") == ["su"] and parts("u") == ["u"]
    assert parts("uaua") == ["u", "u"] and parts("uau") == ["u", "u"]
    assert parts("auuaau") == ["auu", "u"]


# A server of OpenAI's protocol.


class Served:
    """Local server. `reply` gets a request's number and body, and returns status and body, or None to hang up."""

    def __init__(self, reply: Callable[[int, dict[str, Any]], tuple[int, Any] | None]) -> None:
        served, self.requests, lock = self, list[dict[str, Any]](), threading.Lock()
        self.most, self.now = 0, 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(served.requests)
                    served.requests.append({"path": self.path, "headers": dict(self.headers), **body})
                    served.now += 1
                    served.most = max(served.most, served.now)
                answer = reply(number, body)
                with lock:
                    served.now -= 1
                if answer is None:
                    self.close_connection = True
                    return
                content = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    monkeypatch.setattr(responders, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running: list[Served] = []

    def start(reply: Callable[[int, dict[str, Any]], tuple[int, Any] | None]) -> Served:
        running.append(Served(reply))
        return running[-1]

    yield start
    for served in running:
        served.server.shutdown()
        served.server.server_close()


def completion(text: str, reason: str = "stop", **choice: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason, **choice}]}


SERVER = DataSettings(writer="server", author="m", sampling=SamplingParams(24, 0.5, top_p=0.9, seed=5), length=200)


def test_a_server_writes_the_answers(
    tmp_path: Path, target: Target, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(responders.SERVER_KEY, "secret")
    barrier = threading.Barrier(2)

    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        if number < 2:
            barrier.wait(20)  # the first two requests run at once
        asked = body["messages"][-1]["content"]
        return completion(f"ünd {asked}", "length" if asked == "say 3" else "stop")

    served = serve(reply)
    prepared(tmp_path / "a", target, ONE_TURN, SERVER).run(ServerResponder(served.url + "/", "m", 2, {"think": False}))
    assert target.tokenizer is not None
    answers = [target.tokenizer.decode(answer) for _, answer in contents(read_data(tmp_path / "a"))]
    assert answers == [f"ünd say {i}" + ("" if i == 3 else "<|im_end|>") for i in range(7)]
    assert (len(served.requests), served.most) == (7, 2)
    first = next(request for request in served.requests if request["messages"][0]["content"] == "say 0")
    assert first["path"] == "/v1/chat/completions" and first["headers"]["Authorization"] == "Bearer secret"
    expected = {"model": "m", "max_tokens": 24, "temperature": 0.5, "top_p": 0.9}
    assert {name: first[name] for name in expected} == expected
    assert first["chat_template_kwargs"] == {"think": False} and "top_k" not in first
    assert len({request["seed"] for request in served.requests}) == 7


def test_loops_and_long_prompts_are_left_out_and_counted(
    tmp_path: Path, target: Target, serve: Callable[..., Served]
) -> None:
    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any]:
        asked = body["messages"][-1]["content"]
        return completion({"say 1": "la " * 40, "say 2": ""}.get(asked, "yes"), "length")

    served = serve(reply)
    rows = [*ONE_TURN, {"prompt": "long " * 60}]
    counts = prepared(tmp_path / "a", target, rows, SERVER).run(ServerResponder(served.url, "m", 3, {}))["counts"]
    assert counts["left_out"] == {"no supervised token": 1, "repetitive response": 1, "prompt too long": 1}
    assert (counts["rows"], counts["documents"], len(served.requests)) == (8, 5, 7)


def test_a_repetitive_answer_is_written_no_further_and_kept_up_to_its_loop(target: Target) -> None:
    """How many tokens a step commits makes no difference."""
    results = []
    for drafter in ("none", "lookup"):
        responder = engine(target, drafter)
        responder.submit(0, [], [5, 6, 7, 8], SamplingParams(max_new_tokens=200, logit_bias={7: 100.0}))
        [(_, answer)] = responder.responses()
        assert answer.token_ids is not None and not answer.ended
        results.append(answer.token_ids)
    assert results == 2 * [[7] * CHECKED_TOKENS]


def test_many_loops_are_reported_once_and_early(
    tmp_path: Path, target: Target, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "LOOPS_AFTER", 4)

    def run(folder: str, looping: int, settings: DataSettings = SERVER) -> list[str]:
        served = serve(lambda number, body: completion("la " * 40 if number < looping else "yes", "length"))
        notes: list[str] = []
        done = list[int]()

        def note(text: str) -> None:
            notes.append(f"after {len(done)}: {text}")

        preparation = prepared(tmp_path / folder, target, ONE_TURN, settings)
        preparation.run(ServerResponder(served.url, "m", 1, {}), lambda stage, count, total: done.append(count), note)
        return notes

    assert run("a", 3) == [
        "after 4: 3 of 4 responses are repetitive (75%) and kept up to the repetition; --temperature 0.7 (sampling), "
        "with another --out, makes them fewer."
    ]
    [note] = run("b", 1, replace(SERVER, sampling=SamplingParams(24, 0.9, seed=5)))
    assert note.endswith("a smaller --max-new-tokens, with another --out, makes them fewer.")
    assert run("c", 0) == []
    assert loops_note(2, 10, 0.0) is None


def test_a_server_continues_texts(tmp_path: Path, target: Target, serve: Callable[..., Served]) -> None:
    assert target.tokenizer is not None
    prompt = target.tokenizer("say 0")["input_ids"]
    choice = {"text": "x", "finish_reason": "length", "token_ids": [7, 8], "prompt_token_ids": prompt}
    served = serve(lambda number, body: (200, {"choices": [choice]}))
    settings = replace(SERVER, continued=20)
    preparation = prepared(tmp_path / "a", target, ONE_TURN[:1], settings)
    preparation.run(ServerResponder(served.url, "m", 2, {"think": False}))
    assert contents(read_data(tmp_path / "a")) == [(prompt, [7, 8])]
    [request] = served.requests
    assert (request["path"], request["prompt"]) == ("/v1/completions", prompt)
    assert "messages" not in request and "chat_template_kwargs" not in request


def test_a_servers_own_token_ids_are_kept(tmp_path: Path, target: Target, serve: Callable[..., Served]) -> None:
    assert target.tokenizer is not None
    odd = [*(target.tokenizer(letter)["input_ids"][0] for letter in "the"), next(iter(target.eos_token_ids))]
    prompt = chat_ids(target, "say 0")
    server_prompt = [prompt]
    served = serve(
        lambda number, body: (200, completion("the", token_ids=odd)[1] | {"prompt_token_ids": server_prompt[0]})
    )
    prepared(tmp_path / "a", target, ONE_TURN[:1], SERVER).run(ServerResponder(served.url, "m", 2, {}))
    assert contents(read_data(tmp_path / "a")) == [(prompt, odd)]
    server_prompt[0] = prompt[1:]
    with pytest.raises(
        ValueError, match=r"Record 1: The server reads a prompt as \d+ tokens and the target's chat template"
    ):
        prepared(tmp_path / "b", target, ONE_TURN[:1], SERVER).run(ServerResponder(served.url, "m", 2, {}))


def test_a_busy_server_is_asked_again(tmp_path: Path, target: Target, serve: Callable[..., Served]) -> None:
    def reply(number: int, body: dict[str, Any]) -> tuple[int, Any] | None:
        trouble = {0: (503, "busy"), 1: (429, "slow down"), 2: None, 5: (500, "")}
        return trouble.get(number, completion("yes"))

    served = serve(reply)
    counts = prepared(tmp_path / "a", target, ONE_TURN, SERVER).run(ServerResponder(served.url, "m", 3, {}))["counts"]
    assert (counts["documents"], len(served.requests)) == (7, 11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, {"error": "no model m"}), r"refuses a request \(status 404: .*no model m.*check --server and --model"),
        ((500, "broken"), r"did not answer after 7 tries \(status 500"),
        (None, "did not answer after 7 tries"),
        ((200, {"choices": []}), "does not answer as OpenAI's chat completions do"),
        (completion("", "content_filter"), "finish reason 'content_filter'"),
    ],
)
def test_a_server_that_fails_ends_the_run_and_loses_nothing(
    tmp_path: Path, target: Target, serve: Callable[..., Served], answer: Any, message: str
) -> None:
    served = serve(lambda number, body: completion("yes") if number < 3 else answer)
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path / "a", target, ONE_TURN, SERVER).run(ServerResponder(served.url, "m", 1, {}))
    healthy = serve(lambda number, body: completion("yes"))
    again = prepared(tmp_path / "a", target, ONE_TURN, SERVER)
    assert again.missing == 4
    assert again.run(ServerResponder(healthy.url, "m", 1, {}))["counts"]["documents"] == 7


def test_reasoning_that_would_be_dropped_is_refused(
    tmp_path: Path, target: Target, serve: Callable[..., Served]
) -> None:
    thought = {"content": "so", "reasoning_content": "hm"}
    served = serve(lambda number, body: (200, {"choices": [{"message": thought, "finish_reason": "stop"}]}))
    with pytest.raises(ValueError, match="start the server without its reasoning parser"):
        prepared(tmp_path / "a", target, ONE_TURN, SERVER).run(ServerResponder(served.url, "m", 1, {}))
