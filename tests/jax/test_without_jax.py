"""What the backend says where JAX is not installed."""

import importlib.util
from pathlib import Path

import pytest

from blockdraft.targets import load_target


def test_the_remedy_is_named(tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "jax" else own(name, *more))
    with pytest.raises(ValueError, match=r"JAX is not installed; pip install 'blockdraft\[jax\]', and on a TPU"):
        load_target(tiny_target_dir, backend="jax")
