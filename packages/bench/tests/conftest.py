import sys
from pathlib import Path

import pytest
import torch

here = Path(__file__).parent
sys.path += [str(here), str(here / "servers")]  # for some_results.py and fake_server.py

from some_results import ARGUMENTS, DRAFTED_TRIAL, PLAIN_TRIAL, trial  # noqa: E402

from blockdraft_bench.results import Results, results  # noqa: E402


@pytest.fixture
def found() -> Results:
    """Two sets, and a method that is twice as fast on one of them and thrice on the other."""
    trials = []
    for prompt_set, seconds in (("first", 3.0), ("second", 2.0)):
        trials += [trial("none", prompt_set, repeat, 6.0, PLAIN_TRIAL) for repeat in (None, 0, 1)]
        trials += [trial("x", prompt_set, repeat, seconds, DRAFTED_TRIAL) for repeat in (0, 1)]
    return results(trials, ARGUMENTS, torch.device("cpu"))
