from pathlib import Path
from typing import Any

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.serving.backends import Backends, weights_of


def test_a_combination_is_named_hidden_and_counted_whole(engine: Any, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.symlink_to(engine.target.path)
    both = Engine(engine.target, load_drafter(f"prompt_lookup+{folder}", target=engine.target))
    found = Backends(both)
    assert found.drafter == "PromptLookupDrafter+small"
    assert found.public(f"{folder}/config.json is odd.") == "small/config.json is odd."
    assert weights_of(both) == weights_of(engine)
