"""`blockdraft chat` in pipes and terminals, on tiny random models."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from standard_stream import ESCAPES
from transformers import AutoTokenizer

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.types import SamplingParams

GREEN = "\x1b[32m"

Chat = Callable[..., tuple[int, str, str]]


CLEAR = "\x01\x0b"  # keys that empty the line


@pytest.fixture
def chat(blockdraft: Chat, tiny_target_dir: Path, tiny_drafter_dir: Path, own_cache: Path) -> Chat:
    """Runs `blockdraft chat` on the tiny pair, 20 tokens an answer; later options win.

    `keys` are typed at a terminal, and Ctrl-D after them; else `stdin` comes through a pipe.
    """

    def blockdraft_chat(*args: object, keys: str | None = None, **pipe: Any) -> tuple[int, str, str]:
        given = ("chat", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir, "--device", "cpu")
        given += ("--max-new-tokens", 20, "--compile", "off")
        if keys is None:
            return blockdraft(*given, *args, **pipe)
        with create_pipe_input() as keyboard, create_app_session(keyboard, DummyOutput()):
            keyboard.send_text(f"{keys}{CLEAR}\x04")
            return blockdraft(*given, *args, terminal=True, typing=True)

    return blockdraft_chat


@pytest.fixture
def answers(tiny_target_dir: Path) -> Callable[..., list[str]]:
    """What plain decoding answers to messages in turn."""

    def plain(*texts: str, system: str | None = None) -> list[str]:
        target = load_target(tiny_target_dir, device="cpu", compile="off")
        engine = Engine(target, load_drafter("none", target=target))
        messages = [{"role": "system", "content": system}] if system else []
        for text in texts:
            messages.append({"role": "user", "content": text})
            [completion] = engine.generate([messages], SamplingParams(max_new_tokens=20))
            messages.append({"role": "assistant", "content": completion.text})
        return [message["content"] for message in messages if message["role"] == "assistant"]

    return plain


def test_a_pipe_gets_the_answers_and_nothing_else(chat: Chat, answers: Callable[..., list[str]]) -> None:
    first, second = answers("hello", "and then?")
    assert chat(stdin="hello\n\nand then?\n") == (0, f"{first}\n{second}\n", "")
    assert chat(stdin="hello\r\nand then?\r\n") == (0, f"{first}\n{second}\n", "")


@pytest.mark.parametrize("extent", [("--block-size", 3), ("--tree-budget", 6), ("--drafter", "none")])
def test_draft_length_does_not_change_answers(chat: Chat, answers: Callable[..., list[str]], extent: Any) -> None:
    assert chat(*extent, stdin="hello\n")[1] == answers("hello")[0] + "\n"


def test_commands(chat: Chat, answers: Callable[..., list[str]], tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    lines = ["hello", "oops", "/undo", "and then?", f"/save {file}", "/reset", "/system be brief", "hello", "/help"]
    code, out, err = chat(stdin="\n".join(lines))
    hello, oops = answers("hello", "oops")
    then = answers("hello", "and then?")[1]
    assert (code, out) == (0, "\n".join([hello, oops, then, answers("hello", system="be brief")[0]]) + "\n")
    assert "Forgotten: oops" in err and f"Saved to {file}" in err and "/drop" in err
    texts = [message["content"] for message in json.loads(file.read_text())["messages"]]
    assert texts == ["hello", hello, "and then?", then]
    assert chat("--system", "be brief", stdin="hello")[1] == answers("hello", system="be brief")[0] + "\n"


def test_the_oldest_turn_is_dropped(chat: Chat, answers: Callable[..., list[str]]) -> None:
    _, out, err = chat(stdin="hello\n/drop\nwhy\n")
    assert out == answers("hello")[0] + "\n" + answers("why")[0] + "\n" and "Forgotten: hello" in err


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("/undo", "nothing to undo"),
        ("/drop", "nothing to drop"),
        ("/save", "needs the name of a file"),
        ("/save x", "nothing to save"),
        ("/warp 9", "no command /warp; see /help"),
        ("x" * 300, "there is room for 256"),
        (b"caf\xe9", "not utf-8 text"),
    ],
)
def test_errors_in_a_pipe_end_the_chat(chat: Chat, stdin: Any, message: str) -> None:
    more = b"\nhello\n" if isinstance(stdin, bytes) else "\nhello\n"
    code, out, err = chat(stdin=stdin + more)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err and "Traceback" not in err


def test_a_path_is_no_command(chat: Chat, answers: Callable[..., list[str]]) -> None:
    assert chat(stdin="/usr/bin\n /undo\n")[1] == "".join(text + "\n" for text in answers("/usr/bin", " /undo"))


def test_a_terminal_shows_colours_speeds_and_what_was_read(
    chat: Chat, answers: Callable[..., list[str]], tiny_target_dir: Path
) -> None:
    # The target as its own drafter drafts every token right.
    code, out, err = chat("--drafter", tiny_target_dir, "--block-size", 4, keys="hello\rand then?\r")
    first, second = answers("hello", "and then?")
    shown = ESCAPES.sub("", out)
    assert (code, err) == (0, "") and first in shown and second in shown
    lines = re.findall(
        r"^20 tokens, (\d+) drafted, tau (\d\.\d\d), \d+\.\d tokens/s\nread (\d+) tokens, remembered (\d+), "
        r"context (\d+) of 256$",
        shown,
        re.M,
    )
    (drafted, _, read, remembered, context), (_, _, more, reused, longer) = lines
    assert GREEN in out and int(drafted) > 10
    assert int(remembered) == 0 and int(read) + 20 == int(context)
    assert int(reused) >= int(read) and int(more) + int(reused) + 20 == int(longer)


def test_errors_in_a_terminal_keep_the_message(chat: Chat, answers: Callable[..., list[str]]) -> None:
    shorten = "\x01" + "\x06" * 5 + "\x0b\r"
    keys = "hello" * 60 + f"\r{shorten}/save\r{CLEAR}/undo\r\r\x03/exit\r"
    code, out, _ = chat(keys=keys)
    shown = ESCAPES.sub("", out)
    assert code == 0
    assert (
        "there is room for 256" in shown
        and "clear it with Ctrl-U to type a command. /drop drops" in " ".join(shown.split())
        and "error: /save needs" in shown
    )
    assert shown.count(answers("hello")[0]) == 2 and "Ctrl-D or /exit" in shown


def test_a_full_context_is_reported(chat: Chat) -> None:
    _, out, _ = chat("--max-new-tokens", 500, "--repetition-penalty", 1.2, keys="hello" * 30 + "\r")
    assert "The context is full, so the answer is cut. /drop drops" in ESCAPES.sub("", out)
    _, out, _ = chat(keys="hello\r")
    assert "The answer is cut at 20 tokens; --max-new-tokens allows more." in ESCAPES.sub("", out)


def test_an_answer_that_fails_leaves_the_chat_as_it_was(
    chat: Chat, answers: Callable[..., list[str]], altered: Callable[..., Path], tiny_target_dir: Path
) -> None:
    [nan] = AutoTokenizer.from_pretrained(tiny_target_dir)("Q")["input_ids"]
    broken = ("--target", altered(nan_token=nan), "--drafter", "none")
    code, out, _ = chat(*broken, keys="helloQ\r\x7f\r")
    shown = ESCAPES.sub("", out)
    assert code == 0 and "error: " in shown and answers("hello")[0] in shown and " remembered 0," in shown
    assert chat(*broken, stdin="helloQ\nhello\n")[0] == 1


def test_without_chat_template_text_goes_on(chat: Chat, altered: Callable[..., Path]) -> None:
    bare = altered(without="chat_template.jinja")
    code, out, err = chat("--target", bare, stdin="once upon\n a time\n")
    target = load_target(bare, device="cpu", compile="off")
    engine, params = Engine(target, load_drafter("none", target=target)), SamplingParams(max_new_tokens=20)
    [first] = engine.generate(["once upon"], params)
    [second] = engine.generate([f"once upon{first.text} a time"], params)
    assert (code, out) == (0, f"{first.text}\n{second.text}\n") and "no chat template" in err
    assert chat("--target", bare, "--system", "x", stdin="hello\n")[0] == 2


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the terminal that Ctrl-C is of
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        )
        os.close(other)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Read until it is shown; returns what came up to it, which is then forgotten."""
        deadline = time.monotonic() + seconds
        while not (report := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self._end], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{pattern!r} is not in {self.shown!r}"
            try:
                self.shown += ESCAPES.sub("", os.read(self._end, 65536).decode(errors="replace"))
            except OSError:  # it has ended
                raise AssertionError(f"{pattern!r} is not in {self.shown!r}") from None
        before, self.shown = self.shown[: report.end()], self.shown[report.end() :]
        return before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(own_cache: Path) -> Iterator[Terminal]:
    """A chat with the bundled pair."""
    command = [sys.executable, "-m", "blockdraft", "chat", "--device", "cpu", "--backend", "hf"]
    terminal = Terminal(*command, BLOCKDRAFT_CACHE=str(own_cache))
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_a_chat_in_a_real_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("/help lists commands")
    terminal.wait_for(">")
    terminal.type("\x1b[200~What is\n37 + 58?\x1b[201~\r")  # pasted: two lines, one message
    terminal.wait_for(r"read \d+ tokens, remembered 0, context \d+ of 1024")
    terminal.wait_for(">")
    terminal.type("Count from 1 to 10.\r")
    terminal.wait_for(r"remembered [1-9]\d*, context")
    terminal.wait_for(">")
    terminal.type(f"/save {tmp_path / 'chat.jsonl'}\r")
    terminal.wait_for("Saved to")
    terminal.wait_for(">")
    terminal.type("/un\t")
    terminal.wait_for("/undo")
    terminal.type("\r")
    terminal.wait_for("Forgotten: Count from")
    terminal.wait_for("Count from")  # the draft
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /exit ends")
    terminal.wait_for(">")
    for _ in range(2):  # Ctrl-C ends an answer, and the chat goes on
        terminal.type("Count from 1 to 100.\r")
        terminal.wait_for(r"\n\w+")
        terminal.type("\x03")
        terminal.wait_for("Stopped; the chat goes on")
        terminal.wait_for(">")
    terminal.type("\x04")
    assert terminal.process.wait(120) == 0
    messages = json.loads((tmp_path / "chat.jsonl").read_text())["messages"]
    assert messages[0]["content"] == "What is\n37 + 58?" and len(messages) == 4
