"""How a request ends, and what its completion and its last chunk say of it."""

import pytest

from blockdraft.engine import Chunk, Completion, Request, Stats
from blockdraft.engine.text import AnswerText
from blockdraft.errors import BlockdraftError, NumbersError, RequestError
from blockdraft.sampling import RandomNumbers
from blockdraft.types import SamplingParams


@pytest.mark.parametrize("failure", [NumbersError("no numbers"), RequestError("the tokenizer failed")])
def test_a_failure_is_raised_as_what_it_is(failure: BlockdraftError) -> None:
    request = Request([1], SamplingParams(), frozenset(), RandomNumbers(0), AnswerText(None))
    assert request.error is None
    request.fail(failure)
    completion = request.completion()
    chunk = Chunk("", (), (), Stats(), request.finish_reason, request.failure)
    assert request.error == completion.error == chunk.error == str(failure)
    for ended in (completion, chunk):
        with pytest.raises(type(failure), match=str(failure)) as raised:
            ended.checked()
        assert isinstance(raised.value, FloatingPointError) == isinstance(failure, NumbersError)


def test_what_ended_well_is_itself() -> None:
    for ended in (Completion("a", [1], "stop", [False], Stats()), Chunk("a", (1,), (False,), Stats())):
        assert ended.checked() is ended and ended.error is None
