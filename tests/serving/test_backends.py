"""Engines by backend, their names, and the check that drafting changes nothing."""

from pathlib import Path
from typing import Any

import pytest

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.models import TINY
from blockdraft.serving.backends import Backends, count_differences, public_name, weights_of
from blockdraft.types import Drafting


def test_every_member_of_a_hybrid_drafter_is_named_and_counted(engine: Any, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.symlink_to(engine.target.path)
    both = Engine(engine.target, load_drafter(f"lookup+{folder}", target=engine.target))
    backends = Backends(both)
    assert backends.drafter == "lookup+small"
    assert backends.public(f"{folder}/config.json is odd.") == "small/config.json is odd."
    assert weights_of(both) == weights_of(engine)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (None, "nothing"),
        (TINY / "target", "blockdraft-pair"),
        (TINY.parent / "smollm2" / "drafter" / "drafter.gguf", "bundled for smollm2"),
        (Path("/models/some/SmolLM2.Q4_1.gguf"), "SmolLM2.Q4_1"),
        (Path("/hub/models--o--n/snapshots/0a1b"), "o/n"),
    ],
)
def test_public_names(path: Path | None, name: str) -> None:
    assert public_name(path, "nothing") == name


def test_the_self_check_finds_no_difference(engine: Engine) -> None:
    assert count_differences(Engine(engine.target, engine.drafter, drafting=Drafting("auto")), 3) == 0
