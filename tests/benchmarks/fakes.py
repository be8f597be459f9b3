"""Fake peers and answers, without a model."""

from pathlib import Path

from benchmarks.harness.process import PeerProcess
from benchmarks.peers.measure import UNTIMED, Trial
from benchmarks.peers.registry import OURS, Peer

FAKE = Path(__file__).with_name("fake_peer.py")


def fake(name: str, **options: object) -> Peer:
    """Peer that answers at once; for `options` see fake_peer.py."""
    return Peer(name, OURS, str(FAKE), "a fake", options)


def started(peer: Peer, folder: Path, patience: float = 60.0) -> PeerProcess:
    settings = {"options": peer.options, "log": str(folder / f"{peer.name}.asked")}
    return PeerProcess(peer.command(), settings, 1, folder / f"{peer.name}.log", patience)


def trial(peer: str, index: int, repeat: int = UNTIMED, answer: str = "1 2 3 4 5", seconds: float = 1.0) -> Trial:
    steps = len(answer.split()) - 1
    return Trial(peer, "set", index, repeat, answer, 1, steps, prefill_seconds=0.5, decode_seconds=seconds)
