"""Events to the items of a response, and to the events of its stream."""

from __future__ import annotations

import time
import uuid
from typing import Any

from blockdraft.serving.answers import metrics_of
from blockdraft.serving.events import Event, Finished, Reasoning, Text, ToolCall, Usage
from blockdraft.serving.responses_schemas import Item, ResponseRequest, tools_of


class Output:
    """The output of a response as it grows.

    Attributes:
        items: Of the output so far.
    """

    def __init__(self) -> None:
        self.items = list[dict[str, Any]]()
        self._open = False

    def add(self, event: Text | Reasoning | ToolCall) -> list[dict[str, Any]]:
        """The events of a stream that an event becomes, without their numbers."""
        if isinstance(event, ToolCall):
            wires = []
            if event.id is not None:
                wires = self._begin("function_call", "fc", {"call_id": event.id, "name": event.name, "arguments": ""})
            self.items[-1]["arguments"] += event.arguments
            return [*wires, self._wire("function_call_arguments.delta", delta=event.arguments)]
        if not event.text:
            return []
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        wires = [] if self._open and self.items[-1]["type"] == kind else self._begin_text(kind)
        self.items[-1]["content"][0]["text"] += event.text
        return [*wires, self._said("delta", delta=event.text)]

    def end(self, whole: bool) -> list[dict[str, Any]]:
        """The last events of the items. `whole` says that the last item was not cut."""
        begun = [] if self.items else self._begin_text("message")
        return begun + self._close("completed" if whole else "incomplete")

    def as_input(self) -> list[Item]:
        """The items as the next request would repeat them."""
        return [Item.model_validate(item) for item in self.items]

    def _begin_text(self, kind: str) -> list[dict[str, Any]]:
        if kind == "message":
            wires = self._begin(kind, "msg", {"role": "assistant", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            wires = self._begin(kind, "rs", {"summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
        self.items[-1]["content"].append(part)
        return [*wires, self._part("added")]

    def _begin(self, kind: str, prefix: str, item: dict[str, Any]) -> list[dict[str, Any]]:
        wires = self._close("completed")
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **item}
        self.items.append(item)
        self._open = True
        return [*wires, self._item("added")]

    def _close(self, status: str) -> list[dict[str, Any]]:
        if not self._open:
            return []
        self._open, item = False, self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = [self._wire("function_call_arguments.done", arguments=item["arguments"])]
        else:
            done = [self._said("done", text=item["content"][0]["text"]), self._part("done")]
        return [*done, self._item("done")]

    def _said(self, what: str, **more: Any) -> dict[str, Any]:
        kind = self.items[-1]["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        return self._wire(f"{kind}.{what}", content_index=0, **more, **logprobs)

    def _part(self, what: str) -> dict[str, Any]:
        return self._wire(f"content_part.{what}", content_index=0, part=dict(self.items[-1]["content"][0]))

    def _item(self, what: str) -> dict[str, Any]:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": f"response.output_item.{what}", "output_index": len(self.items) - 1, "item": item}

    def _wire(self, name: str, **more: Any) -> dict[str, Any]:
        at = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **at, **more}


class Answer:
    """A response as it grows.

    Args:
        temperature: Of requests that name none.
        most_guesses: That a cycle may have; None leaves out the statistics of drafting.

    Attributes:
        end: Tokens and reason of a finished one.
    """

    end: Finished | None = None

    def __init__(self, body: ResponseRequest, model: str, temperature: float, most_guesses: int | None = None) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output = Output()
        self._status, self._number = "in_progress", 0
        self._error: dict[str, Any] | None = None
        self._completed: int | None = None
        self._most_guesses = most_guesses
        self._fixed = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": body.reasoning.summary if body.reasoning else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": temperature if body.temperature is None else body.temperature,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": _echo(body),
            "tools": tools_of(body.tools),
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [self._about("created"), self._about("in_progress")]

    def add(self, event: Event) -> list[dict[str, Any]]:
        """The events of a stream that an event becomes."""
        if not isinstance(event, Finished):
            return [self._numbered(wire) for wire in self.output.add(event)]
        self.end = event
        self._status = "incomplete" if event.reason == "length" else "completed"
        self._completed = int(time.time()) if self._status == "completed" else None
        wires = [self._numbered(wire) for wire in self.output.end(whole=event.reason != "length")]
        return [*wires, self._about(self._status)]

    def fail(self, message: str) -> list[dict[str, Any]]:
        """The same for what goes wrong."""
        self._status, self._error = "failed", {"code": "server_error", "message": message}
        return [self._about("failed")]

    def body(self) -> dict[str, Any]:
        """The response so far."""
        cut = self._status == "incomplete"
        more: dict[str, Any] = {}
        if self.end is not None and self._most_guesses is not None:
            more["metrics"] = metrics_of([self.end], self._most_guesses)
        return {
            **self._fixed,
            "status": self._status,
            "completed_at": self._completed,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(self.output.items),
            "usage": usage_of(self.end.usage) if self.end else None,
            **more,
        }

    def _about(self, what: str) -> dict[str, Any]:
        return self._numbered({"type": f"response.{what}", "response": self.body()})

    def _numbered(self, wire: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": wire["type"], "sequence_number": self._number - 1, **wire}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
        "total_tokens": usage.prompt + usage.completion,
    }


def _echo(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}
