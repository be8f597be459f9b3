"""Words of messages."""

from blockdraft.errors import counted


def test_one_is_no_plural() -> None:
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
