"""Which rows hold the beginning of a prompt, so that it need not be read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16  # tokens; a shorter beginning is not worth a copy


class PrefixIndex:
    """The texts of rows by the hashes of their blocks of tokens, each hashed with all blocks before it."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._rows: dict[int, dict[int, None]] = {}  # by hash, those whose text has this block, in order

    def add(self, row: int, text: Sequence[int]) -> None:
        """Know the text of a row, which replaces what was known of it."""
        self.remove(row)
        self._texts[row] = list(text)
        for key in _hashes(text):
            self._rows.setdefault(key, {})[row] = None

    def remove(self, row: int) -> None:
        """Know the row no longer, if it was known."""
        for key in set(_hashes(self._texts.pop(row, ()))):  # two blocks of it may share one
            del self._rows[key][row]
            if not self._rows[key]:
                del self._rows[key]

    def longest(self, text: Sequence[int]) -> tuple[int, int] | None:
        """The row whose text has most tokens in common with this one from the beginning on, and how many these are.

        None where they do not make a block. Of equally good rows the one that has been known longest.
        """
        found = None
        for count, key in enumerate(_hashes(text), start=1):
            if key not in self._rows:
                break
            found = count, key
        if found is None:
            return None
        count, key = found
        held = {row: common(self._texts[row], text) for row in self._rows[key]}
        row = max(held, key=held.__getitem__)
        # Different blocks may have one hash; then what is in common is less than a hash says, and still true.
        return (row, held[row]) if held[row] >= BLOCK else None


class Remembered:
    """Rows of requests that have ended, the least recently used first.

    Args:
        most: Tokens of all of them together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.texts: OrderedDict[int, list[int]] = OrderedDict()

    def add(self, row: int, text: list[int]) -> list[int]:
        """Remember a row, which `most` suffices for. Returns the rows that have to go: those that it holds as a whole,
        and then the least recently used."""
        gone = [known for known, held in self.texts.items() if common(held, text) == len(held)]
        for known in gone:
            del self.texts[known]
        self.texts[row] = text
        while sum(map(len, self.texts.values())) > self.most:
            gone.append(self.forget())
        return gone

    def use(self, row: int) -> None:
        """It was of use just now."""
        if row in self.texts:
            self.texts.move_to_end(row)

    def forget(self) -> int:
        """The least recently used row, which is remembered no longer."""
        row, _ = self.texts.popitem(last=False)
        return row


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _hashes(text: Sequence[int]) -> list[int]:
    """One for each whole block."""
    hashes, before = [], 0
    for end in range(BLOCK, len(text) + 1, BLOCK):
        before = hash((before, tuple(text[end - BLOCK : end])))
        hashes.append(before)
    return hashes
