import json
from pathlib import Path

import pytest
import torch

from benchmarks.overlap import COUNTS, Times, figures, main, one_device, page, pays_between, ranked, shares, speedup
from blockdraft.decode.proposal import Proposal
from blockdraft.targets import BUNDLED

# Tokens, parents and chances behind the anchor 1. The chain is 5, 6, 7: the last of it is not verified.
TREE = [(5, 0, 0.7), (8, 0, 0.2), (6, 1, 0.5), (9, 1, 0.1), (7, 3, 0.3), (4, 3, 0.15), (6, 2, 0.14), (3, 5, 0.2)]


def test_outcomes_are_the_ends_of_a_chains_walks() -> None:
    tokens, parents, acceptance_probs = zip(*TREE, strict=True)
    tree = Proposal(torch.tensor([[1, *tokens]]), torch.tensor([[-1, *parents]]), acceptance_probs=(acceptance_probs,))
    assert ranked(tree, [5, 6], 9) == [(2, 7), (0, 8), (2, 4), (1, 9)]
    assert ranked(tree, [5, 6], 2) == [(2, 7), (0, 8)]
    assert ranked(tree, [5], 9) == [(1, 6), (0, 8), (1, 9)]
    assert ranked(tree, [2, 6], 9) == [(0, 5), (0, 8)]


@pytest.mark.parametrize("hits", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("growth", [1.0, 1.2, 3.0])
@pytest.mark.parametrize("handover", [0.0, 0.01, 0.4])
def test_break_even_is_where_the_speedup_crosses_one(hits: float, growth: float, handover: float) -> None:
    parts = [n / 1000 for n in range(1, 1000)]
    drafts = [part / (1 - part) for part in parts]
    faster = [
        part for part, d in zip(parts, drafts, strict=True) if speedup(hits, 1.0, d, growth * d, handover) > 1 + 1e-9
    ]
    found = pays_between(hits, growth, handover)
    if found is None:
        assert not faster
    else:
        assert (faster[0], faster[-1]) == pytest.approx(found, abs=0.0011)


def test_speedups_by_hand() -> None:
    assert speedup(1.0, 8.0, 2.0, 2.0) == pytest.approx(10 / 8)  # the draft is hidden
    assert speedup(0.5, 8.0, 2.0, 4.0, 1.0) == pytest.approx(10 / (1 + 0.5 * 8 + 0.5 * 10))
    assert speedup(0.5, 8.0, 2.0, 9.0) == pytest.approx(10 / (0.5 * 9 + 0.5 * 10))  # the drafts are not ready
    assert speedup(0.0, 8.0, 2.0, 9.0) == 1.0
    assert one_device(1.0, 8.0, 2.0, 2.0) == 1.0
    assert one_device(0.5, 8.0, 2.0, 3.0) == pytest.approx(10 / (8 + 3 + 0.5 * 2))
    assert pays_between(0.0, 1.0, 0.1) is None


def test_hits_are_counted_among_as_many_as_are_drafted() -> None:
    foreseen = [(0, 5), (1, 6), (2, 7)]
    cycles = [(foreseen, (0, 5)), (foreseen, (1, 6)), (foreseen, (2, 7)), (foreseen, (2, 8))]
    found = figures(shares(cycles), len(cycles), Times(8.0, {1: 2.0, 2: 2.5, 4: 3.0}), 0.0)
    assert [(each.count, each.hits) for each in found] == [(1, 0.25), (2, 0.5), (4, 0.75)]
    assert found[2].speedup == pytest.approx(10 / (0.75 * 8 + 0.25 * 10))
    assert found[2].pays == (0.0, pytest.approx(2 / 3))  # three drafts take half as long again as one
    assert found[0].noise == pytest.approx(1.96 * (0.25 * 0.75 / 4) ** 0.5)
    text = page(found, Times(8.0, {1: 2.0}), 4)
    assert "draft's share is 20.0%" in text and "would be 1.250" in text and "0.0% to 66.7%" in text


@pytest.mark.slow
def test_the_bundled_pair_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "What is 3 + 4?"}\n{"prompt": "Name a fruit."}\n')
    options = ["--prompts", str(prompts), "--max-new-tokens", "24", "--cycles", "2", "--out", str(tmp_path / "out")]
    main(options)
    facts = json.loads((tmp_path / "out/overlap.json").read_text())
    found = facts["figures"]
    assert [each["count"] for each in found] == list(COUNTS) and facts["outcomes"] > 4
    hits = [each["hits"] for each in found]
    assert hits == sorted(hits) and 0 < hits[-1] <= 1
    assert (tmp_path / "out/overlap.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "out/overlap.png").read_bytes().startswith(b"\x89PNG")
    model = ["--drafter", str(BUNDLED), "--drafter-device", "cpu", "--out", str(tmp_path / "model")]
    main([*options, *model])  # the target itself, as a language model that drafts ahead
    facts = json.loads((tmp_path / "model/overlap.json").read_text())
    assert facts["outcomes"] > 4 and all(0 <= each["hits"] <= 1 for each in facts["figures"])
    capsys.readouterr()
    for wrong, message in ((["--block-size", "99"], "--block-size is 99"), (["--drafter", "prompt_lookup"], "likely")):
        with pytest.raises(SystemExit):
            main([*options, *wrong])
        assert message in capsys.readouterr().err
