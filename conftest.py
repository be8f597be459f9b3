"""What holds for all tests, and the fixtures that all of them may use."""

import gc
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):
    import setuptools  # noqa: F401  before distutils, which it replaces and torch.compile imports

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
# What tests measure and learn is none of what the user's own runs begin with; compiled libraries are kept for the next.
OWN_CACHE = Path(__file__).parent / "build/tests-cache"
os.environ.setdefault("BLOCKDRAFT_CACHE", str(OWN_CACHE))
if "PYTEST_XDIST_WORKER" not in os.environ and os.environ["BLOCKDRAFT_CACHE"] == str(OWN_CACHE):
    shutil.rmtree(OWN_CACHE / "costs", ignore_errors=True)

sys.path.insert(0, str(Path(__file__).parent / "tests"))


def pytest_configure(config: pytest.Config) -> None:
    """Import the fixtures, except where tests are only handed out to workers, which would wait for torch."""
    gc.disable()  # what is imported and collected stays; looking through it again and again takes a quarter of the time
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        for name in ("tiny_models", "command_line", "installed_plugin"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_finish() -> None:
    """Exempt what stays from later collections of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()
