"""Standard streams of commands that run in this process."""

import io
import re

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Stream(io.TextIOWrapper):
    """A standard stream that is or is not a terminal."""

    def __init__(self, content: bytes = b"", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8", newline="")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]
