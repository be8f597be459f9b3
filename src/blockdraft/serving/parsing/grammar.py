"""Grammars that leave a model no choice but to call a tool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.errors import UsageError
from blockdraft.serving.events import ToolChoice
from blockdraft.serving.parsing.formats.base import literal
from blockdraft.serving.parsing.template import THINK, THOUGHT, format_of, is_thinking, schemas_of, thinks
from blockdraft.types import Grammar


def grammar_of(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    tool_choice: ToolChoice,
    parallel: bool = True,
    prompt_text: str = "",
) -> Grammar | None:
    """What an answer must look like that has to call a tool, in the format of the chat template.

    Reasoning may come first where the template knows of it. A named tool is called once, any of several once or, if
    `parallel`, more often.

    Args:
        tools: OpenAI's function tools.
        prompt_text: The prompt as text, whose end may have begun the reasoning.

    Returns:
        None where the model may answer without a call.

    Raises:
        UsageError: The tool is none of `tools`, or the template has no format for calls.
    """
    if tool_choice.mode != "required" and tool_choice.name is None:
        return None
    schemas = schemas_of(tools)
    name = tool_choice.name
    if not schemas:
        raise UsageError("tool_choice asks for a call, and there are no tools; send tools, or leave tool_choice out.")
    if name is not None and name not in schemas:
        raise UsageError(f"tool_choice names {name!r}; the tools are {', '.join(schemas)}.")
    form, added = format_of(tokenizer), set(tokenizer.get_added_vocab())
    calls = [form.grammar(one, schema, added) for one, schema in schemas.items() if name in (None, one)]
    again = f" ({literal(form.separator, added)} call)*" if parallel and name is None else ""
    rules = [f"start: {_thought(tokenizer, prompt_text, added)}call{again}", f"call: {' | '.join(calls)}"]
    # Behind a token that was added, the text before needs no end of its own.
    rules.append("thought: /(?s:.*)/ " + THOUGHT if THOUGHT in added else f'thought[suffix="{THOUGHT}"]: /(?s:.*)/')
    return Grammar("lark", "\n".join([*rules, form.rules]))


def _thought(tokenizer: PreTrainedTokenizerBase, prompt_text: str, added: Collection[str]) -> str:
    """What may come before the calls."""
    if is_thinking(prompt_text):
        return r"thought /\s*/ "
    if not thinks(tokenizer) or prompt_text.rstrip().endswith(THOUGHT):
        return ""
    return rf"({literal(THINK, added)} thought /\s*/)? "
