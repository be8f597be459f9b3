"""Grammars that force a model to call a tool, or to write its text in a given format."""

from __future__ import annotations

import json
from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from blockdraft.chat_text import HARMONY, harmony_ids
from blockdraft.engine.grammar import JSON_STYLE, checked_schema, compile_schema, relax
from blockdraft.errors import UsageError
from blockdraft.serving.json_schemas import Schema, tool_schemas
from blockdraft.serving.request import ChatMessages
from blockdraft.serving.tool_calls.formats import (
    THINK,
    THINK_END,
    TOOL_CALL,
    TOOL_CALL_END,
    allows_parallel_calls,
    format_of,
    is_reasoning,
    literal,
    may_reason,
    object_schema,
)
from blockdraft.serving.tool_calls.harmony import PROMPT_END, harmony_grammar
from blockdraft.types import Grammar


def grammar_of(
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatMessages,
    prompt_text: str = "",
    content: Grammar | None = None,
    dropped: list[str] | None = None,
) -> Grammar | None:
    """Return the grammar for output that must call a tool or whose text must be JSON, or None for free output.

    The output may begin with reasoning if the template knows it. A required call is of the named tool or of any. After
    it, with parallel calls, the model decides: more calls, text, or the end; without free text, more calls or the end.
    Otherwise nothing follows. If no call is required, the output is either calls or content.

    Args:
        prompt_text: The rendered chat, at whose end the reasoning may begin.
        content: Grammar of the text, which must be JSON; None allows any text.
        dropped: Receives a line for each keyword of the tools' schemas that no grammar expresses. Others often wrote
            these schemas, so such keywords are left out.

    Raises:
        UsageError: The required tool is not among the tools, a schema is wrong, the template has no known format of
            calls, or its format cannot be distinguished from JSON.
    """
    name, required = chat.tool_choice.name, chat.tool_choice.mode == "required"
    tools = tool_schemas(chat.tools) if required or (content and chat.tool_choice.mode == "auto") else {}
    if required and not tools:
        raise UsageError("tool_choice is a call without tools; give tools, or leave tool_choice out.")
    if name is not None and name not in tools:
        raise UsageError(f"tool_choice names {name[:80]!r}; the tools are {', '.join(tools)[:200]}.")
    if not tools and content is None:
        return None
    tools = {tool: _enforced(tool, schema, dropped) for tool, schema in tools.items()}
    if harmony_ids(tokenizer):
        chosen = {tool: schema for tool, schema in tools.items() if name in (None, tool)}
        expression = None if content is None or required else _json_content(content)
        begun = not prompt_text.endswith(PROMPT_END)
        return Grammar("lark", harmony_grammar(chosen, expression, begun, HARMONY))
    added = {TOOL_CALL, TOOL_CALL_END, THINK, THINK_END} & set(tokenizer.get_added_vocab())
    reasoning = _optional_reasoning(tokenizer, prompt_text, added)
    if not tools and not reasoning:
        return content
    # The expression /.*/ never matches an added token, so it ends before the marker without a suffix.
    end = f": /(?s:.*)/ {THINK_END}" if THINK_END in added else f'[suffix="{THINK_END}"]: /(?s:.*)/'
    rules, outputs = [f"reasoning{end}"], []
    if tools:
        form = format_of(tokenizer)
        if not required and not form.marked:
            raise UsageError(
                "response_format and tools cannot be combined with this model, since its calls are plain JSON; leave "
                'out one of them, or set tool_choice to "required" or "none".'
            )
        parallel = chat.parallel_tool_calls and allows_parallel_calls(tokenizer) and name is None
        if parallel and required and content is None:
            marks = [marker for marker in (TOOL_CALL, TOOL_CALL_END) if marker in added]
            more = f" (({' | '.join(marks)}) text)*" if marks else ""
            outputs.append(f"call text{more}")
            rules.append("text: /(?s:.*)/")
        else:
            outputs.append(f"call ({literal(form.separator, added)} call)*" if parallel else "call")
        calls = [form.grammar(tool, schema, added) for tool, schema in tools.items() if name in (None, tool)]
        rules += [f"call: {' | '.join(calls)}", form.rules]
    if content is not None and not required:
        outputs.append("content")
        rules.append(f"content: {_json_content(content)}")
    return Grammar("lark", "\n".join([f"start: {reasoning}({' | '.join(outputs)})", *rules]))


def _enforced(tool: str, schema: Schema, dropped: list[str] | None) -> Schema:
    """Return the schema of a tool's arguments as it is enforced. `dropped` is that of `grammar_of`."""
    try:
        text, left_out = relax(json.dumps(object_schema(schema)), references=True)
    except ValueError as error:
        raise UsageError(f"tools holds parameters of {tool} that cannot be followed: {error}.") from error
    if dropped is not None:
        dropped += [f"tools: {keyword} in the parameters of {tool} is not enforced." for keyword in left_out]
    enforced: Schema = json.loads(text)
    return enforced


def _json_content(content: Grammar) -> str:
    """Return JSON as an expression of Lark, in the same style as without tools and reasoning."""
    schema = content.text or '{"type": "object"}'
    try:
        compile_schema(schema)
    except ValueError as error:
        raise UsageError(f"The grammar of kind {content.kind} is refused: {error}.") from error
    return "%json " + json.dumps({"x-guidance": JSON_STYLE, **checked_schema(json.loads(schema))})


def _optional_reasoning(tokenizer: PreTrainedTokenizerBase, prompt_text: str, added: Collection[str]) -> str:
    """Return the optional reasoning at the start of the output as an expression of Lark."""
    if is_reasoning(prompt_text):
        return r"reasoning /\s*/ "
    if not may_reason(tokenizer) or prompt_text.rstrip().endswith(THINK_END):
        return ""
    return rf"({literal(THINK, added)} reasoning /\s*/)? "
