"""What a tokenizer's chat template says of the answers to expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from blockdraft.errors import UsageError
from blockdraft.serving.parsing.formats import FORMATS, Format, Tools

THINK, THOUGHT = "<think>", "</think>"


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat template, that for tools where there are several; empty where there is none."""
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default") or ""
    return str(template)


def format_of(tokenizer: PreTrainedTokenizerBase) -> Format:
    """The format in which the template asks for tool calls.

    Raises:
        UsageError: It asks for none, or for an unknown one.
    """
    template = template_of(tokenizer)
    fitting = [one for one in FORMATS.values() if one.fits(template)] if "tools" in template else []
    if not fitting:
        lacks = "has tool calls in an unknown format" if "tools" in template else "takes no tools"
        raise UsageError(
            f"tools is given, and the model's chat template {lacks}; send none, or serve a model whose template has "
            f"one of the formats {', '.join(FORMATS)}."
        )
    return fitting[0]


def takes_several_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a message with several calls can be part of a chat; templates of Llama 3 refuse it."""
    return "single tool-call" not in template_of(tokenizer)


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether answers may begin with reasoning."""
    return THOUGHT in template_of(tokenizer)


def is_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends with reasoning that has begun."""
    return prompt_text.rstrip().endswith(THINK)


def schemas_of(tools: Sequence[dict[str, Any]]) -> Tools:
    """The schemas of the arguments of OpenAI's function tools, by name.

    Raises:
        UsageError: A tool has no name or a schema that is none, or two have the same name.
    """
    schemas = dict[str, dict[str, Any]]()
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise UsageError(f"tools holds {str(tool)[:80]}; every tool needs a function with a name.")
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
            raise UsageError(f"tools holds parameters of {name} that are no JSON schema of an object; give one.")
        if name in schemas:
            raise UsageError(f"tools holds {name} twice; give every tool a name of its own.")
        schemas[name] = schema
    return schemas
