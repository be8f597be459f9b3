"""How a request ends, and what its completion and its last chunk say of it."""

from collections.abc import Callable

import pytest

from blockdraft.engine import Chunk, Completion, Request, Stats
from blockdraft.errors import BlockdraftError, NumbersError, RequestError
from blockdraft.types import SamplingParams


def made(listener: Callable[[Chunk], object] | None = None) -> Request:
    return Request(prompt=[1], params=SamplingParams(), listener=listener)


@pytest.mark.parametrize("failure", [NumbersError("no numbers"), RequestError("the tokenizer failed")])
def test_a_failure_is_raised_as_what_it_is(failure: BlockdraftError) -> None:
    request = made()
    assert request.error is None
    request.fail(failure)
    completion = request.completion()
    chunk = Chunk("", (), (), Stats(), request.finish_reason, request.failure)
    assert request.error == completion.error == chunk.error == str(failure)
    for ended in (completion, chunk):
        with pytest.raises(type(failure), match=str(failure)) as raised:
            ended.checked()
        assert isinstance(raised.value, FloatingPointError) == isinstance(failure, NumbersError)


def test_those_who_wait_learn_of_the_end_when_it_is_published() -> None:
    request = made()
    request.extend([5, 6], [False, True])
    request.finish("length")
    with pytest.raises(TimeoutError):
        request.result(0)
    request.publish()
    assert (request.result(0).token_ids, request.result(0).finish_reason) == ([5, 6], "length")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_listener_raises_ends_the_request(error: BaseException) -> None:
    def listener(chunk: Chunk) -> None:
        raise error

    for ended in (False, True):
        request = made(listener)
        request.extend([5], [False])
        if ended:
            request.finish("length")
        request.publish()
        request.publish()  # as the scheduler does with one that has ended
        with pytest.raises(RequestError, match="listener failed"):
            request.result(0).checked()


def test_a_tokenizer_that_has_failed_is_not_asked_for_the_last_chunk() -> None:
    chunks: list[Chunk] = []
    request = made(chunks.append)
    request.extend([5], [False])
    request.text.take = lambda: 1 / 0
    request.fail(failure := RequestError("The tokenizer failed."))
    request.publish()
    assert [(chunk.text, chunk.token_ids, chunk.failure) for chunk in chunks] == [("", (5,), failure)]


def test_what_ended_well_is_itself() -> None:
    for ended in (Completion("a", [1], "stop", [False], Stats()), Chunk("a", (1,), (False,), Stats())):
        assert ended.checked() is ended and ended.error is None
