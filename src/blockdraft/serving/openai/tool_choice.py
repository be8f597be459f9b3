"""Tool choices in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import model_validator

from blockdraft.errors import UsageError
from blockdraft.serving.request import ToolChoice
from blockdraft.serving.schemas import Listed, Schema, name_of_tool


class OfferedTool(NamedTuple):
    """A tool that the model may call.

    Attributes:
        name: Name by which the model calls it, which begins with the namespace.
        template: The tool as chat templates take it.
        is_text: Whether it is a custom tool, whose input is a text.
        call: Fields that identify it in calls of the Responses API.
    """

    name: str
    template: dict[str, Any]
    is_text: bool
    call: dict[str, Any]

    def has_name(self, name: str) -> bool:
        return name in (self.name, self.call["name"])

    def check_kind(self, kind: str, place: str) -> None:
        """Raise a UsageError if a choice calls a custom tool a function, or a function a custom tool."""
        own = "custom" if self.is_text else "function"
        if kind in ("custom", "function") and kind != own:
            raise UsageError(f"{place} names {self.name[:80]!r} as a {kind} tool; its type is {own!r}.")


class NamedChoice(Schema):
    """A tool that must be called, or tools to choose from (the type `allowed_tools`).

    OpenAI's two APIs nest the fields differently. Both forms are accepted.
    """

    type: Literal["function", "custom", "allowed_tools"] = "function"
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Listed[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unnest(cls, values: Any) -> Any:
        """Take the fields from where chat completions have them."""
        inner = values.get(str(values.get("type"))) if isinstance(values, dict) else None
        return {**values, **inner} if isinstance(inner, dict) else values

    @property
    def echo(self) -> dict[str, Any]:
        """The choice as responses repeat it."""
        return self.model_dump(include={"type", "mode", "tools"} if self.type == "allowed_tools" else {"type", "name"})

    def choose(self, offered: Sequence[OfferedTool]) -> tuple[ToolChoice, list[OfferedTool]]:
        """Return the choice, and those of the offered tools that it allows. Raise as `choose` does."""
        if self.type != "allowed_tools":
            if not self.name:
                raise UsageError("tool_choice.name is missing; name one of the tools.")
            tool = next((tool for tool in offered if tool.has_name(self.name)), None)
            if tool is not None:
                tool.check_kind(self.type, "tool_choice")
            return ToolChoice("required", tool.name if tool else self.name), list(offered)
        if not self.tools:
            raise UsageError(
                'tool_choice.tools is missing or empty; list tools that may be called, or set tool_choice to "none".'
            )
        allowed = list[OfferedTool]()
        for entry in self.tools:
            name, kind = name_of_tool(entry), str(entry.get("type", "function"))
            chosen = [tool for tool in offered if tool.has_name(name) or name == tool.call.get("namespace")]
            if kind in ("function", "custom") and not chosen:
                names = ", ".join(tool.name for tool in offered)
                raise UsageError(f"tool_choice allows {name[:80]!r}; the tools are {names[:200]}.")
            for tool in chosen:
                tool.check_kind(kind, "tool_choice")
            allowed += chosen  # tools of other types run on OpenAI's servers only
        return ToolChoice(self.mode), [tool for tool in offered if tool in allowed]


AnyToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedChoice


def choose_tools(
    choice: AnyToolChoice | None, offered: Sequence[OfferedTool]
) -> tuple[ToolChoice, tuple[dict[str, Any], ...]]:
    """Return a tool choice, and the tools to choose from as chat templates take them.

    Raises:
        UsageError: The choice names no tool, one that is not offered, or one of another type.
    """
    mode, tools = choice.choose(offered) if isinstance(choice, NamedChoice) else (ToolChoice(choice or "auto"), offered)
    return mode, tuple(tool.template for tool in tools)
