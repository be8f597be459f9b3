"""What requests of /v1/responses hold, and the jobs that they mean. Unknown fields are ignored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.serving import jobs
from blockdraft.serving.events import ChatJob, Speculation, ToolChoice
from blockdraft.serving.schemas import Body, Listed, Sampled, Table, Tokens
from blockdraft.types import Grammar

TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class Part(Body):
    """A piece of a message. Only texts are read; others are refused."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Body):
    """A message, a call, its result, or reasoning. What it holds depends on its type; see `messages_of`."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Listed[Part] | None = None
    summary: Listed[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Listed[Part] | None = None


class Choice(Body):
    """`allowed_tools` leaves a choice among some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Listed[dict[str, Any]] = []


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    effort: str | None = None
    summary: str | None = None


class ResponseRequest(Sampled):
    """Those of `Sampled` that OpenAI's API lacks are taken too."""

    refused = Sampled.refused | {
        "n": (1,),
        "max_tokens": (),
        "background": (False,),
        "conversation": (),
        "top_logprobs": (0,),
    }

    input: str | Listed[Item] = ""
    instructions: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Tokens | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Listed[str] | None = None
    metadata: Table[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # What answers repeat, and nothing else needs.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def format(self) -> Format:
        return (self.text and self.text.format) or Format(type="text")


def job_of(body: ResponseRequest, said: Sequence[dict[str, Any]], temperature: float) -> ChatJob:
    """The job of a request.

    Args:
        said: Messages of the conversation, the request's own included.
        temperature: Of requests that name none.

    Raises:
        UsageError: A field holds what cannot be answered.
    """
    if "message.output_text.logprobs" in (body.include or ()):
        raise UsageError(
            "include names logprobs, which are not reported here; leave it out, or use /v1/chat/completions."
        )
    tools = tools_of(body.tools)
    choice, tools = _choice(body.tool_choice, tools)
    if not said:
        raise UsageError("input is empty; give a text, or a list of items.")
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return ChatJob(
        messages=[*instructions, *said],
        params=replace(jobs.sampling(body, temperature), grammar=_grammar(body.format)),
        max_new_tokens=body.max_output_tokens,
        tools=tuple({"type": "function", "function": _without_type(tool)} for tool in tools),
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        speculation=Speculation() if body.speculation is None else body.speculation.speculation(),
        template=_template(body),
    )


def messages_of(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """Messages as chat templates take them; what the assistant said in a row is one.

    Raises:
        UsageError: An item is of a type that no text model reads, or lacks what it must hold.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages = list[dict[str, Any]]()
    for number, item in enumerate(given):
        place = f"input.{number}"
        if item.type == "message" and item.role is not None and item.content is not None:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _texts(f"{place}.content", item.content)})
        elif item.type == "function_call" and item.call_id and item.name:
            function = {"name": item.name, "arguments": _arguments(place, item.arguments or "{}")}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.type == "function_call_output" and item.call_id and item.output is not None:
            text = _texts(f"{place}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        elif item.type == "reasoning":
            text = _texts(place, item.content or item.summary or "")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif item.type in NEEDED:
            raise UsageError(f"{place} is a {item.type} that lacks something; it needs {NEEDED[item.type]}.")
        else:
            raise UsageError(
                f"{place} is of the type {item.type[:40]!r}; this server takes {', '.join(NEEDED)} and reasoning."
            )
    return _joined(messages)


NEEDED = {
    "message": "role and content",
    "function_call": "call_id, name and arguments",
    "function_call_output": "call_id and output",
}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reasoning, text and calls of the assistant that follow each other in this order are one message."""
    joined = list[dict[str, Any]]()
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        if message["role"] != "assistant" or last["role"] != "assistant":
            joined.append(message)
        elif "tool_calls" in message:
            joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        elif "reasoning_content" not in message and not last["content"] and "tool_calls" not in last:
            joined[-1] = {**last, "content": message["content"]}
        else:
            joined.append(message)
    return joined


def _texts(place: str, content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXTS or (part.text is None and part.refusal is None):
            raise UsageError(
                f"{place} holds a part of the type {part.type[:40]!r}; this model reads texts alone, as "
                f'{{"type": "input_text", "text": "..."}}.'
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _arguments(place: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"{place}.arguments is no JSON object; give one as a text.")
    return arguments


def tools_of(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The functions among the tools, as answers repeat them. Those of other types are left out: OpenAI's servers run
    them, or their calls have a format that models of chat templates do not know."""
    functions = [tool for tool in tools or () if tool.get("type") == "function"]
    for tool in functions:
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise UsageError(f"tools holds {str(tool)[:80]}; every function needs a name.")
        if not isinstance(tool.get("parameters") or {}, dict):
            raise UsageError(
                f"tools holds parameters of {tool['name']} that are no JSON schema of an object; give one."
            )
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": str(tool.get("description") or ""),
            "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
            "strict": tool.get("strict") is True,
        }
        for tool in functions
    ]


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters")}


def _choice(given: str | Choice | None, tools: list[dict[str, Any]]) -> tuple[ToolChoice, list[dict[str, Any]]]:
    """The choice, and the tools among which it is."""
    if given in (None, "auto", "none"):
        return ToolChoice("none" if given == "none" else "auto"), tools
    names = [tool["name"] for tool in tools]
    if isinstance(given, Choice) and given.type not in ("function", "allowed_tools"):
        raise UsageError(f"tool_choice is of the type {given.type[:40]!r}; name a function, or give auto or required.")
    if isinstance(given, Choice) and given.type == "allowed_tools":
        allowed = [tool.get("name") for tool in given.tools if tool.get("type") == "function"]
        tools = [tool for tool in tools if tool["name"] in allowed]
        if given.mode == "auto":
            return ToolChoice(), tools
    if not tools:
        raise UsageError("tool_choice is a call, and there are no functions to call; give tools of that type.")
    if isinstance(given, str) or given is None or given.type == "allowed_tools":
        return ToolChoice("required"), tools
    if given.name not in names:
        raise UsageError(f"tool_choice names {str(given.name)[:80]!r}; the tools are {', '.join(names)[:200]}.")
    return ToolChoice("required", given.name), tools


def _grammar(form: Format) -> Grammar | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Grammar("json_object")
    if form.schema_ is None:
        raise UsageError("text.format is json_schema without a schema; give text.format.schema.")
    return Grammar("json_schema", json.dumps(form.schema_))


def _template(body: ResponseRequest) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        given["enable_thinking"] = False
    return {**given, **(body.chat_template_kwargs or {})}
