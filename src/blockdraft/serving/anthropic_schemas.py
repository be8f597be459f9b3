"""What requests of Anthropic's API hold, and the jobs that they mean. Unknown fields are ignored."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.serving import jobs
from blockdraft.serving.events import ChatJob, Speculation, ToolChoice
from blockdraft.serving.schemas import Body, Listed, Sampled, Stops, Tokens, Word
from blockdraft.types import Grammar

# Claude Code's first line differs in each request: after it nothing of an earlier one could be remembered.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


class Block(Body):
    """A piece of a message. What it holds depends on its type; see `_Blocks`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Listed[Block] | None = None
    is_error: bool | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Listed[Block]


class Tool(Body):
    """Types other than "custom" are tools that Anthropic itself runs."""

    type: str | None = None
    name: Word
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class Choice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: str


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """A chat whose tokens are counted."""

    refused = {"mcp_servers": ()}

    model: Word
    messages: Annotated[Listed[Message], Field(min_length=1)]
    system: str | Listed[Block] | None = None
    tools: Listed[Tool] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, Sampled):
    """Those of `Sampled` that Anthropic's API lacks are taken too."""

    refused = Sampled.refused | CountRequest.refused | {"n": (1,)}

    max_tokens: Tokens
    stop_sequences: Stops | None = None
    output_format: OutputFormat | None = None  # the name of output_config.format while that was in its beta
    tool_choice: Choice | None = None


def job_of(body: MessagesRequest, temperature: float) -> ChatJob:
    """The job of a request, without a bound on its tokens.

    Args:
        temperature: Of requests that name none.

    Raises:
        UsageError: A field holds what cannot be answered.
    """
    params = jobs.sampling(body, temperature)
    tools = tools_of(body.tools)
    form = (body.output_config and body.output_config.format) or body.output_format
    grammar = None if form is None else Grammar("json_schema", json.dumps(form.schema_))
    if body.messages[-1].role == "assistant":
        raise UsageError(
            "messages ends with the assistant's; to go on inside of an answer is not supported, so end with the user's."
        )
    return ChatJob(
        messages=messages_of(body),
        params=replace(params, stop=(*params.stop, *(body.stop_sequences or ())), grammar=grammar),
        tools=tuple(tools),
        tool_choice=_choice(body.tool_choice, tools),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        speculation=Speculation() if body.speculation is None else body.speculation.speculation(),
        template=template_of(body),
    )


def template_of(body: CountRequest) -> dict[str, Any]:
    """Variables of the chat template. As in Anthropic's API, only who asks for thinking gets it."""
    thinking = body.thinking is not None and body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config else None
    given = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": thinking, **given, **(body.chat_template_kwargs or {})}


def tools_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape. Those that Anthropic would run are left out: no one here runs them."""
    own = [tool for tool in tools or () if tool.type in (None, "custom")]
    for tool in own:
        if tool.input_schema is None:
            raise UsageError(f"tools holds {tool.name} without input_schema; give the JSON schema of its input.")
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in own
    ]


def _choice(choice: Choice | None, tools: list[dict[str, Any]]) -> ToolChoice:
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise UsageError(f"tool_choice is {choice.type!r}, and there are no tools; give tools, or leave it out.")
    if choice.type == "any":
        return ToolChoice("required")
    if choice.name not in names:
        raise UsageError(f"tool_choice names {str(choice.name)[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", choice.name)


def messages_of(body: CountRequest) -> list[dict[str, Any]]:
    """Messages as chat templates take them, the system's first.

    Raises:
        UsageError: A block is of a type that no text model reads, or lacks what it must hold.
    """
    messages = list[dict[str, Any]]()
    if system := BILLING.sub("", _texts("system", body.system or "")):
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        place = f"messages.{number}.content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(place, message.content))
        else:
            messages += _said(place, message.role, message.content)
    return messages


def _assistant(place: str, blocks: list[Block]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    made["content"] = _texts(
        place, [one for one in blocks if one.type not in ("thinking", "redacted_thinking", "tool_use")]
    )
    thoughts = [one.thinking for one in blocks if one.type == "thinking" and one.thinking]
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    calls = [one for one in blocks if one.type == "tool_use"]
    if any(one.id is None or one.name is None for one in calls):
        raise UsageError(f"{place} holds a tool_use without id or name; give both.")
    if calls:
        made["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input or {}}}
            for one in calls
        ]
    return made


def _said(place: str, role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """A message of the user, which may hold results of tools: these are messages of their own."""
    made, texts = list[dict[str, Any]](), list[Block]()
    for block in blocks:
        if block.type != "tool_result":
            texts.append(block)
            continue
        if block.tool_use_id is None:
            raise UsageError(f"{place} holds a tool_result without tool_use_id; give it.")
        if texts:
            made.append({"role": role, "content": _texts(place, texts)})
            texts = []
        text = _texts(place, block.content or "")
        made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    if texts or not made:
        made.append({"role": role, "content": _texts(place, texts)})
    return made


def _texts(place: str, content: str | Listed[Block]) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise UsageError(
                f"{place} holds a block of the type {block.type[:40]!r}; this model reads texts alone, as "
                f'{{"type": "text", "text": "..."}}.'
            )
    return "\n".join(block.text or "" for block in content)
