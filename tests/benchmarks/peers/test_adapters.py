"""Adapters of installed packages, on tiny random models."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.process import PeerError, PeerProcess
from benchmarks.peers.registry import PEERS, REFERENCE

from blockdraft import Drafting, Engine, SamplingParams, load_drafter, load_target
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint

pytestmark = pytest.mark.slow
PLAIN = (REFERENCE, "transformers lookup")
HERE = (REFERENCE, "transformers dflash", "transformers lookup", "ours ddtree")
PROMPT, MAX, STOPS = [7, 60, 33, 12, 9, 60, 33], 24, [2]


@pytest.fixture
def settings(tiny_target_dir: Path, tiny_drafter_dir: Path) -> dict[str, Any]:
    folders = {"target": str(tiny_target_dir), "drafter": str(tiny_drafter_dir), "assistant": None}
    return {**folders, "dtype": "float32", "device": "cpu", "threads": 1, "max_length": 64}


def adapter(name: str, settings: dict[str, Any], folder: Path) -> PeerProcess:
    [peer] = [peer for peer in PEERS if peer.name == name]
    command = [sys.executable, peer.command()[1]]
    return PeerProcess(command, {**settings, "options": peer.options}, 1, folder / "log", 120)


@pytest.mark.parametrize("name", [HERE[0], *(pytest.param(name, marks=pytest.mark.long) for name in HERE[1:])])
def test_adapters_decode_alike(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    target = load_target(settings["target"])
    drafting = Drafting(tree_budget=32 if name == "ours ddtree" else 0)
    drafter = load_drafter("none" if name in PLAIN else settings["drafter"], target=target)
    params = SamplingParams(MAX, stop_token_ids=tuple(STOPS), ignore_eos=True)
    [expected] = Engine(target, drafter, drafting=drafting).generate([PROMPT], params)
    with adapter(name, settings, tmp_path) as peer:
        for _ in range(2):  # the second must not know of the first
            answer = peer.ask("decode", {"prompt": PROMPT, "max_new_tokens": MAX, "stops": STOPS})
            assert answer["tokens"] == expected.token_ids
            assert answer["prefill_seconds"] > 0 and answer["decode_seconds"] > 0
            if "lookup" not in name:
                assert answer["first"] == 1
                assert answer["steps"] == len(expected.stats.committed)
        if name == REFERENCE:
            best = expected.token_ids[0]
            pairs = ([best, best], [best, best - 1], [best - 1, best])
            margins = [peer.ask("margin", {"tokens": PROMPT, "ids": ids})["margin"] for ids in pairs]
            assert margins[0] == 0 < margins[1] == -margins[2]


@pytest.mark.parametrize("part", [pytest.param("target", marks=pytest.mark.long), "drafter"])
def test_ours_is_compiled_or_not_measured(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    if part == "target":
        monkeypatch.setenv("CC", "no-such-compiler")
    else:
        config, _ = read_checkpoint(Path(settings["drafter"]))
        odd = replace(config, head_dim=6)
        write_checkpoint(tmp_path / "odd", odd, DFlashNetwork(odd).state_dict())
        settings["drafter"] = str(tmp_path / "odd")
    with pytest.raises(PeerError, match="no C compiler" if part == "target" else "drafter is not compiled: heads of 6"):
        adapter("ours dflash", settings, tmp_path)
    if part == "drafter":  # which plain decoding does not need
        with adapter("ours plain", settings, tmp_path):
            pass


def test_our_ways_share_a_target_and_draft_tokens_can_be_replaced(settings: dict[str, Any], tmp_path: Path) -> None:
    chain = {"drafting": {"block_size": 4}}
    options = {"compiled": True, "ways": {"plain": {"drafter": "none"}, "chain": chain, "tree": {}}}
    request = {"prompt": PROMPT, "max_new_tokens": 22, "stops": []}
    command = [sys.executable, PEERS[-1].command()[1]]
    with PeerProcess(command, {**settings, "options": options}, 1, tmp_path / "log", 120) as peer:
        found = {way: peer.ask("decode", {**request, "way": way}) for way in options["ways"]}
        assert found["plain"]["steps"] == 21
        assert found["plain"]["tokens"] == found["chain"]["tokens"] == found["tree"]["tokens"]
        for _ in range(2):
            forced = peer.ask("decode", {**request, "way": "chain", "accept": [3, 0, 9]})
            assert forced["tokens"] == found["plain"]["tokens"]
            assert forced["steps"] == 7  # of 4, 1, 4, 4, 1, 4, and what is left of 21 tokens
        assert peer.ask("decode", {**request, "way": "plain", "accept": [3]})["steps"] == 21


def test_what_an_adapter_lacks(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no smaller model"):
        adapter("transformers assistant", settings, tmp_path)
