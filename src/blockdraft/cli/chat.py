"""`blockdraft chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from blockdraft.cli.display import standard, tell
from blockdraft.cli.target import (
    DecodingTarget,
    DrafterSettings,
    DraftingOptions,
    Sampling,
    tell_unused,
)
from blockdraft.errors import BlockdraftError, UsageError
from blockdraft.machine import uncollected
from blockdraft.types import SamplingParams

if TYPE_CHECKING:
    from blockdraft.engine import Chunk, Completion, Conversation, PendingTurn

CHAT = SamplingParams(max_new_tokens=1024)
COMMANDS = {
    "/undo": "Take back the last message and its answer, and edit the message.",
    "/drop": "Drop the oldest message and its answer, which makes room.",
    "/reset": "Start again, with the same system message.",
    "/system TEXT": "Use this system message from now on; without TEXT, none.",
    "/save FILE": "Write the conversation to a new file, as a JSON line that `blockdraft data` reads.",
    "/help": "List the commands.",
    "/exit": "End the chat.",
}
KEYS = "Enter sends. Alt-Enter begins a new line. Ctrl-C stops an answer, Ctrl-D ends the chat."
ROOM = "/drop drops the oldest turn, /undo the last one, /reset all; /save FILE keeps a copy first."
RAW = "The target has no chat template: it continues your text, and your next text is added to that."
COMMAND = re.compile(r"/(\w+)(?:\s+(.*))?\s*", re.DOTALL)

Read = Callable[[str, str], str]  # reads a line, given the prompt sign and the text to edit


def chat(
    *,
    model: DecodingTarget,
    drafter: DrafterSettings,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message at the beginning of the conversation.")
    ] = None,
    sampling: Sampling = CHAT,
    drafting: DraftingOptions,
) -> None:
    """Talk with a model.

    Accepted draft tokens are green, and a line below each answer shows its speed. Each turn computes only what is new.
    /help lists commands and keys. If standard input or output is not a terminal, each line of the input is a message,
    and only the answers are printed.
    """
    tell_unused(sampling, [sampling.temperature], drafting.sampled)

    with uncollected():
        from blockdraft.engine import Conversation, chat_engine

        target = model.load_for(drafter.drafter, drafter.draft_vocab)
        loaded = drafter.load(target)
    with chat_engine(target, loaded, drafting) as engine:
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        ChatSession(Conversation(engine, system), sampling, standard() if is_terminal else None).run()


class ChatSession:
    """A chat with a person, or with a pipe.

    Args:
        console: The person's terminal. Without one, each line of standard input is a message, only answers go to
            standard output, notes go to standard error, and an error ends the chat.
    """

    def __init__(self, conversation: Conversation, params: SamplingParams, console: Console | None = None) -> None:
        self._conversation, self._params, self._console = conversation, params, console
        self._read = _read_line if console is None else _terminal_reader()
        self._draft = ""  # text to begin the next message with

    def run(self) -> None:
        """Chat until the input ends.

        Raises:
            BlockdraftError: An answer or command failed, and there is no terminal.
        """
        from blockdraft.cli.answers import drafter_note
        from blockdraft.engine import ContextFull

        if self._console is not None:
            engine = self._conversation.engine
            note = f", the drafter {note}" if (note := drafter_note(engine)) else ""
            self._tell(f"{engine.target.path}{note}. /help lists commands and keys.")
        if not self._conversation.has_template:
            self._tell(RAW)
        while True:
            draft, self._draft = self._draft, ""
            try:
                text = self._read("> ", draft)
            except EOFError:
                return
            except KeyboardInterrupt:
                if self._console is None:
                    raise
                self._tell("Ctrl-D or /exit ends the chat.")
                continue
            command = COMMAND.fullmatch(text)
            if command and command[1] == "exit":
                return
            try:
                if command:
                    self._obey(command[1], (command[2] or "").strip())
                elif text.strip():
                    self._answer(text)
            except BlockdraftError as error:
                if self._console is None:
                    raise
                self._tell(f"error: {error}", "red")
                if isinstance(error, ContextFull):
                    self._tell(f"Your message is in the line again; clear it with Ctrl-U to type a command. {ROOM}")
                self._draft = text

    def _obey(self, name: str, argument: str) -> None:
        conversation = self._conversation
        if name == "help":
            for usage, meaning in COMMANDS.items():
                self._tell(f"{usage:14}{meaning}")
            self._tell(KEYS)
        elif name in ("undo", "drop"):
            text = conversation.undo() if name == "undo" else conversation.forget_oldest()
            if text is None:
                raise UsageError(f"There is nothing to {name}.")
            self._tell(f"Forgotten: {text[:60]}{'...' if len(text) > 60 else ''}")
            self._draft = text if name == "undo" else ""
        elif name == "reset":
            conversation.reset()
            self._tell("The conversation starts again.")
        elif name == "system":
            conversation.set_system(argument)
            self._tell("The system message is set." if argument else "There is no system message now.")
        elif name == "save":
            if not argument:
                raise UsageError("/save needs the name of a file.")
            conversation.save(argument)
            self._tell(f"Saved to {argument}.")
        else:
            raise UsageError(f"There is no command /{name}; see /help. Begin with a space to send it as a message.")

    def _answer(self, text: str) -> None:
        from blockdraft.cli.answers import show_chunks
        from blockdraft.engine.text import AnswerText

        try:
            text.encode()
        except UnicodeEncodeError as error:  # invalid bytes of a terminal arrive as lone surrogates
            raise UsageError("The message is not valid UTF-8 text.") from error
        conversation = self._conversation
        if self._console is None:
            print(conversation.keep(conversation.ask(text, self._params)).text, flush=True)
            return
        chunks: SimpleQueue[Chunk] = SimpleQueue()
        turn = conversation.ask(text, self._params, chunks.put)
        tokenizer, request = conversation.engine.target.tokenizer, turn.request
        answer = AnswerText(tokenizer, self._params.stop, prompt=request.prompt, end_ids=request.stop_ids)
        with _on_ctrl_c(turn.request.cancel):
            _, summary = show_chunks(self._console, _until_end(chunks), answer)
        completion = conversation.keep(turn)
        remembered = completion.stats.remembered
        summary.append(
            f"\nread {completion.prompt_tokens - remembered} tokens, remembered {remembered}, "
            f"context {completion.prompt_tokens + len(completion.token_ids)} of {conversation.limit}"
        )
        summary.stylize("dim")
        self._console.print(summary)
        self._tell_end(turn, completion)
        self._console.print()

    def _tell_end(self, turn: PendingTurn, completion: Completion) -> None:
        if not completion.text:
            self._tell("There was no answer, so the message is not kept.")
            self._draft = turn.text
        elif completion.finish_reason == "cancelled":
            self._tell("Stopped; the chat goes on from here.")
        elif completion.finish_reason == "length":
            if completion.prompt_tokens + len(completion.token_ids) >= self._conversation.limit:
                self._tell(f"The context is full, so the answer is cut. {ROOM}")
            else:
                self._tell(f"The answer is cut at {len(completion.token_ids)} tokens; --max-new-tokens allows more.")

    def _tell(self, text: str, colour: str = "yellow") -> None:
        if self._console is None:
            tell(text)
        else:
            self._console.print(Text(text, style=colour))


def _read_line(prompt: str, draft: str) -> str:
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not {error.encoding} text ({error.reason}).") from error
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def _terminal_reader() -> Read:
    """Return a reader with history and editing. Pasted text is one message, however many lines it has."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    names = WordCompleter([usage.split()[0] for usage in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=keys, completer=names, complete_while_typing=False, prompt_continuation=". "
    )
    return lambda prompt, draft: session.prompt(prompt, default=draft)


def _until_end(chunks: SimpleQueue[Chunk]) -> Iterator[Chunk]:
    while True:
        chunk = chunks.get()
        yield chunk
        if chunk.finish_reason is not None:
            return


@contextmanager
def _on_ctrl_c(stop: Callable[[], object]) -> Iterator[None]:
    """Let the first Ctrl-C call `stop`; a second one interrupts as usual."""

    def handle_once(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, handle_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
