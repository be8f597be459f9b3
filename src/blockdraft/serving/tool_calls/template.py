"""What a chat template reveals about the output of its model: the format of tool calls, and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.errors import UsageError
from blockdraft.serving.tool_calls.formats import FORMATS, Format, Tools

THINK, THINK_END = "<think>", "</think>"


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the chat template, of several the one for tools, or "" without one."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def format_of(tokenizer: PreTrainedTokenizerBase) -> Format:
    """Return the format in which the template asks for tool calls.

    Raises:
        UsageError: The template takes no tools, or its format is unknown.
    """
    template = template_of(tokenizer)
    takes_tools = "tools" in template
    for form in FORMATS.values():
        if takes_tools and form.fits(template):
            return form
    problem = "has tool calls in an unknown format" if takes_tools else "takes no tools"
    raise UsageError(
        f"tools is given, and the model's chat template {problem}; leave tools out, or serve a model whose template "
        f"has one of the formats {', '.join(FORMATS)}."
    )


def allows_parallel_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template accepts a message with several calls, which templates of Llama 3 refuse."""
    return "single tool-call" not in template_of(tokenizer)


def may_reason(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the output may begin with reasoning."""
    return THINK_END in template_of(tokenizer)


def is_reasoning(prompt_text: str) -> bool:
    """Return whether the reasoning begins at the end of the prompt."""
    return prompt_text.rstrip().endswith(THINK)


def tool_schemas(tools: Sequence[dict[str, Any]]) -> Tools:
    """Map the names of OpenAI's function tools to the schemas of their arguments.

    Raises:
        UsageError: A tool has no name or an invalid schema, or two have the same name.
    """
    schemas = dict[str, dict[str, Any]]()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise UsageError(f"tools holds {str(tool)[:80]}; every tool needs a function with a name.")
        if name in schemas:
            raise UsageError(f"tools holds {name} twice; give every tool a name of its own.")
        schemas[name] = _check_schema(name, function.get("parameters") or {})
    return schemas


def _check_schema(tool: str, schema: Any) -> dict[str, Any]:
    """Check the schema of a tool's arguments and return it without keys that are null, which count as absent."""
    kind = schema.get("type") or "object" if isinstance(schema, dict) else None
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise UsageError(
            f'tools holds parameters of {tool} that are not the JSON schema of an object; give one of type "object".'
        )
    checked: dict[str, Any] = {key: value for key, value in schema.items() if value is not None}
    properties, required = checked.get("properties", {}), checked.get("required", [])
    if not isinstance(properties, dict):
        raise UsageError(
            f'tools holds parameters of {tool} whose "properties" are not an object; map names to schemas.'
        )
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise UsageError(f'tools holds parameters of {tool} whose "required" is not a list of names; list the names.')
    if properties or required:  # a null schema, and a required name without a schema, allow any value
        schemas = {name: True if value is None else value for name, value in properties.items()}
        checked["properties"] = schemas | {name: True for name in required if name not in schemas}
    return checked
