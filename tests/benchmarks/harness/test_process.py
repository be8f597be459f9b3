import sys
from pathlib import Path

import pytest
from benchmarks.harness.process import PeerError, PeerProcess
from fakes import fake, started

REQUEST = {"prompt": [7], "max_new_tokens": 5, "stops": [0]}


def test_a_peer_answers_until_it_is_closed(tmp_path: Path) -> None:
    with started(fake("a"), tmp_path) as peer:
        assert peer.about == {"fake": "1.0"}
        assert peer.ask("decode", REQUEST)["tokens"] == [7, 8, 9, 10, 11]
        assert peer.ask("decode", {**REQUEST, "prompt": [1]})["tokens"] == [1, 2, 3, 4, 5]
    assert peer.process.returncode is not None


@pytest.mark.parametrize(
    "options, reason",
    [({"missing": "no compiler"}, "no compiler"), ({"crash": "bad wheel"}, "it ended with 1: bad wheel")],
)
def test_a_peer_that_does_not_load_says_why(options: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=reason):
        started(fake("a", **options), tmp_path)


def test_a_peer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="nowhere cannot be started"):
        PeerProcess([str(tmp_path / "nowhere")], {}, 1, tmp_path / "log", 1)


@pytest.mark.parametrize(
    "option, reason",
    [
        ("die", "it ended with 1: out of memory"),
        ("fail", "ValueError: no"),
        pytest.param("hang", "within 2 s", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_fails_says_why(option: str, reason: str, tmp_path: Path) -> None:
    with started(fake("a", **{option: 7}), tmp_path, patience=2) as peer, pytest.raises(PeerError, match=reason):
        peer.ask("decode", REQUEST)


def test_a_peer_that_has_ended(tmp_path: Path) -> None:
    with started(fake("a", die=7), tmp_path) as peer:
        for _ in range(2):
            with pytest.raises(PeerError, match="out of memory"):
                peer.ask("decode", REQUEST)


def test_threads_reach_the_peer(tmp_path: Path) -> None:
    program = 'import os; print(\'{"ready": {"threads": "\' + os.environ["OMP_NUM_THREADS"] + \'"}}\')'
    with PeerProcess([sys.executable, "-c", program], {}, 3, tmp_path / "log", 60) as peer:
        assert peer.about == {"threads": "3"}
