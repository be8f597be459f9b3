"""Grammars that force a model to call a tool, or to answer in a given form."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from blockdraft.engine.grammar import JSON_STYLE, compile_schema
from blockdraft.errors import UsageError
from blockdraft.serving.core.events import ToolChoice
from blockdraft.serving.parsing.formats import literal
from blockdraft.serving.parsing.template import THINK, THOUGHT, format_of, is_thinking, schemas_of, thinks
from blockdraft.types import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def grammar_of(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    tool_choice: ToolChoice,
    parallel: bool = True,
    prompt_text: str = "",
    content: Grammar | None = None,
) -> Grammar | None:
    """The grammar of an answer that must call a tool, in the format of the chat template, or whose text must be JSON.

    The answer may begin with reasoning if the template knows it. A named tool is called once. Without a name, any tool
    is called, once or, if `parallel`, several times. If no call is required, the answer is either calls or `content`.

    Args:
        tools: OpenAI's function tools.
        prompt_text: The prompt as text. The reasoning may begin at its end.
        content: Grammar of the text, which must be JSON; None allows any text.

    Returns:
        None if the answer may be any text.

    Raises:
        UsageError: The named tool is not among `tools`, the template has no known format of calls, or its format cannot
            be told from JSON.
    """
    name = tool_choice.name
    forced = tool_choice.mode == "required" or name is not None
    schemas = schemas_of(tools) if forced or (content is not None and tool_choice.mode == "auto") else {}
    if forced and not schemas:
        raise UsageError("tool_choice asks for a call without tools; give tools, or leave tool_choice out.")
    if name is not None and name not in schemas:
        raise UsageError(f"tool_choice names {name!r}; the tools are {', '.join(schemas)}.")
    if not schemas and content is None:
        return None
    added = set(tokenizer.get_added_vocab())
    thought = _thought(tokenizer, prompt_text, added)
    if not schemas and not thought:
        return content
    # The expression /.*/ never matches an added token, so it ends before the marker without a suffix.
    rules = ["thought: /(?s:.*)/ " + THOUGHT if THOUGHT in added else f'thought[suffix="{THOUGHT}"]: /(?s:.*)/']
    ways = []
    if schemas:
        form = format_of(tokenizer)
        if not forced and not form.marked:
            raise UsageError(
                "response_format and tools cannot be combined with this model, since its calls are plain JSON; leave "
                'out one of them, or set tool_choice to "required" or "none".'
            )
        again = f" ({literal(form.separator, added)} call)*" if parallel and name is None else ""
        ways.append(f"call{again}")
        calls = [form.grammar(one, schema, added) for one, schema in schemas.items() if name in (None, one)]
        rules += [f"call: {' | '.join(calls)}", form.rules]
    if content is not None and not forced:
        ways.append("content")
        rules.append(f"content: {_json(content)}")
    return Grammar("lark", "\n".join([f"start: {thought}({' | '.join(ways)})", *rules]))


def _json(content: Grammar) -> str:
    """JSON as an expression of Lark, in the same style as without tools and reasoning."""
    text = content.text or '{"type": "object"}'
    try:
        compile_schema(text)
    except ValueError as error:
        raise UsageError(f"The grammar of kind {content.kind} is refused: {error}.") from error
    return "%json " + json.dumps({"x-guidance": JSON_STYLE, **json.loads(text)})


def _thought(tokenizer: PreTrainedTokenizerBase, prompt_text: str, added: Collection[str]) -> str:
    """The optional reasoning before the answer, as an expression of Lark."""
    if is_thinking(prompt_text):
        return r"thought /\s*/ "
    if not thinks(tokenizer) or prompt_text.rstrip().endswith(THOUGHT):
        return ""
    return rf"({literal(THINK, added)} thought /\s*/)? "
