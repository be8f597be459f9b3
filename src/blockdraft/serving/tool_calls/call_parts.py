"""Numbers and ids of tool calls, and their arguments piece by piece."""

from __future__ import annotations

import uuid
from dataclasses import replace

from blockdraft.serving.request import ToolCall, ToolCallDelta
from blockdraft.serving.tool_calls.formats import Call


class CallParts:
    """Makes the parts of an output's tool calls. Deltas of a call that the model writes come before the whole call.

    Attributes:
        num_calls: Number of complete calls.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._begun: ToolCallDelta | None = None  # all of the call that is being written, as far as it was returned

    def begin(self, call: Call) -> list[ToolCallDelta]:
        """Return the deltas for the new arguments of a call that is being written.

        Args:
            call: Its arguments as far as they are certain.
        """
        parts = []
        if self._begun is None:
            self._begun = ToolCallDelta(self.num_calls, _new_id(), call.name, "")
            parts.append(self._begun)
        if call.arguments.startswith(self._begun.arguments) and call.arguments != self._begun.arguments:
            parts.append(replace(self._begun, arguments=call.arguments.removeprefix(self._begun.arguments)))
            self._begun = replace(self._begun, arguments=call.arguments)
        return parts

    def complete(self, call: Call) -> ToolCall:
        """Return a whole call, with the id of the one that was begun."""
        call_id = self._begun.id if self._begun else _new_id()
        self.num_calls, self._begun = self.num_calls + 1, None
        return ToolCall(self.num_calls - 1, call_id, call.name, call.arguments)

    def drop(self) -> None:
        """Forget a call that was begun and is text after all."""
        self._begun = None


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
