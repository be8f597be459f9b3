"""Facts about answers that a tokenizer's chat template tells: format of tool calls, reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blockdraft.errors import UsageError
from blockdraft.serving.parsing.formats import FORMATS, Format, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, THOUGHT = "<think>", "</think>"


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat template. Of several, that for tools; empty without any."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def format_of(tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format in which the template asks for tool calls.

    Raises:
        UsageError: The template takes no tools, or its format is unknown.
    """
    template = template_of(tokenizer)
    fitting = [one for one in FORMATS.values() if one.fits(template)] if "tools" in template else []
    if not fitting:
        lacks = "has tool calls in an unknown format" if "tools" in template else "takes no tools"
        raise UsageError(
            f"tools is given, and the model's chat template {lacks}; leave tools out, or serve a model whose template "
            f"has one of the formats {', '.join(FORMATS)}."
        )
    return fitting[0]


def takes_several_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template accepts a message with several calls, which templates of Llama 3 refuse."""
    return "single tool-call" not in template_of(tokenizer)


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether answers may begin with reasoning."""
    return THOUGHT in template_of(tokenizer)


def is_thinking(prompt_text: str) -> bool:
    """Whether the reasoning begins at the end of a prompt."""
    return prompt_text.rstrip().endswith(THINK)


def schemas_of(tools: Sequence[dict[str, Any]]) -> Tools:
    """The schemas of the arguments of OpenAI's function tools, by name.

    Raises:
        UsageError: A tool has no name or an invalid schema, or two have the same name.
    """
    schemas = dict[str, dict[str, Any]]()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise UsageError(f"tools holds {str(tool)[:80]}; every tool needs a function with a name.")
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise UsageError(f"tools holds parameters of {name} that are not the JSON schema of an object; give one.")
        if name in schemas:
            raise UsageError(f"tools holds {name} twice; give every tool a name of its own.")
        schemas[name] = schema
    return schemas
