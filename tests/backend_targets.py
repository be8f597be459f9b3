"""Targets of the backends in packages of their own, for tests that run both."""

from pathlib import Path

from blockdraft.targets import Target, backends, load_target
from blockdraft.types import LoadOptions

PACKAGES = {"mlx": "mlx_lm", "jax": "jax.numpy"}  # tests/jax is a package `jax` without it


def load(path: Path | None, backend: str) -> Target:
    """Load a target in float32, on one device even where JAX has more."""
    if backend != "jax" or path is None:
        return load_target(
            path, dtype="float32", device="cpu", backend=backend, compile="off" if backend == "native" else "auto"
        )
    import jax

    from blockdraft_jax.model import local_layout

    options = LoadOptions(dtype="float32", device="cpu")
    target: Target = backends()["jax"].load(path, options, local_layout(jax.local_devices()[:1]))
    return target
