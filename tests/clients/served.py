"""A running server as the tests of clients see it."""

from dataclasses import dataclass
from pathlib import Path

KEY = "a-key-of-the-tests"
MODEL = "small"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Server:
    """`url` is its address without /v1."""

    url: str
    target: Path

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"
