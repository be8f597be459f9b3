from pathlib import Path

import pytest

from benchmarks.peers import environments
from benchmarks.peers.registry import PEERS, PLAIN, REFERENCE, choose


def test_names_and_adapters() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for peer in PEERS:
        assert Path(peer.command()[1]).is_file()
        assert peer.is_ours or peer.environment in environments.INSTALLERS


def test_some_peers_come_with_what_they_are_compared_to() -> None:
    assert choose(None) == list(PEERS)
    assert [peer.name for peer in choose(["ours dflash", "dflash"])] == [REFERENCE, "dflash", PLAIN, "ours dflash"]
    with pytest.raises(ValueError, match="Peer 'vllm' is unknown; there are: dflash, "):
        choose(["vllm"])


def test_a_peer_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "BUILD", tmp_path)
    reasons = {peer.name: peer.why_missing() for peer in PEERS}
    assert reasons["dflash"] == "not installed; run `make bench-peers`"
    assert reasons[PLAIN] is None


def test_names_can_be_listed() -> None:
    assert not [peer.name for peer in PEERS if "," in peer.name]
