from pathlib import Path

import pytest
import torch

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.engine.adaptive.calibrate import Probe
from blockdraft.targets import load_target


@pytest.mark.parametrize(("rows", "draft_tokens", "tree"), [(1, 0, False), (3, 5, False), (2, 30, True)])
def test_cycles_have_the_guesses_that_are_asked_for(
    tiny_target_dir: Path, tiny_drafter_dir: Path, rows: int, draft_tokens: int, tree: bool
) -> None:
    target = load_target(tiny_target_dir)
    found = Probe(target, load_drafter(tiny_drafter_dir, target=target))(rows, 20, draft_tokens, tree, 3)
    assert [count for count, _ in found] == [draft_tokens] * 3 and all(seconds > 0 for _, seconds in found)


def test_rows_have_read_their_prompts(tiny_target_dir: Path) -> None:
    target = load_target(tiny_target_dir)
    runner, rows = Probe(target, load_drafter("none", target=target)).rows(3, 50, 9)
    assert [runner.held(row.start) for row in rows] == [50] * 3
    assert not any(row.reading for row in rows) and len({tuple(row.request.token_ids) for row in rows}) == 1
    cache = target.new_cache(1, 50)
    tokens = torch.tensor([rows[0].request.prompt])
    last = target.forward(tokens, chain_parents(1, 50), cache, logits_at=torch.tensor([49])).logits
    assert rows[0].request.token_ids == [int(last.argmax())]


def test_more_nodes_than_the_context_holds_are_measured_nevertheless(
    tiny_target_dir: Path, tiny_drafter_dir: Path
) -> None:
    """Nodes past its end are never committed by an engine, and a forward takes them."""
    target = load_target(tiny_target_dir)
    probe = Probe(target, load_drafter(tiny_drafter_dir, target=target))
    assert [count for count, _ in probe(1, target.max_context // 2, 200, True, 2)] == [200] * 2
