"""Limits that end an infill before the model does."""

from __future__ import annotations

import time

from blockdraft.serving.request import TextDelta


class InfillLimits:
    """Ends an infill early. It takes the place of the parser of a chat's output.

    Args:
        max_seconds: Seconds after which the infill ends, once it has a line end; None is no limit.
        min_indent: Indentation in characters that each new line must have.
    """

    called = False

    def __init__(self, max_seconds: float | None, min_indent: int) -> None:
        self._max_seconds, self._min_indent = max_seconds, min_indent
        self._began: float | None = None
        self._line_begun = False  # whether the text has a line end
        self._held = ""  # line end and blanks, shown once the line is indented enough
        self.ended = False

    def push(self, text: str) -> list[TextDelta]:
        if self.ended:
            return []
        self._began = self._began or time.monotonic()
        shown = ""
        for character in text:
            if character == "\n":
                shown, self._held, self._line_begun = shown + self._held, character, True
            elif self._held and character in " \t\r":
                self._held += character
            elif self._held and len(self._held) - 1 < self._min_indent:
                self._held, self.ended = "", True
                break
            else:
                shown, self._held = shown + self._held + character, ""
        if self._max_seconds is not None and self._line_begun:
            self.ended = self.ended or time.monotonic() - self._began > self._max_seconds
        return [TextDelta(shown)] if shown else []

    def finish(self, cut: bool = False) -> list[TextDelta]:
        held, self._held = self._held, ""
        return [TextDelta(held)] if held and not self.ended else []
