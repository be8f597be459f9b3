"""The modules that one decode step enters, as docs/architecture.md lists them."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import blockdraft
from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.targets import load_target
from blockdraft.types import Drafting, SamplingParams

SOURCE = Path(blockdraft.__file__).parent
PAIR = SOURCE / "pair" / "tiny"


def modules_of_a_step(drafter: str | Path, drafting: Drafting) -> set[str]:
    """Return the files of blockdraft that one greedy step of the tiny pair enters."""
    target = load_target(PAIR / "target", compile="on")
    engine = Engine(target, load_drafter(drafter, target=target), drafting=drafting)
    scheduler, request = engine.scheduler, engine.request("Tom has 3 boxes.", SamplingParams(40, ignore_eos=True))
    scheduler.add([request])
    for _ in range(5):
        scheduler.step()
    modules = set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            modules.add(str(path.relative_to(SOURCE)))

    before = len(request.token_ids)
    profiler = sys.getprofile()
    sys.setprofile(note)
    try:
        scheduler.step()
    finally:
        sys.setprofile(profiler)
    assert len(request.token_ids) > before
    return modules


def documented_modules(drafts: bool) -> set[str]:
    """Return the files that docs/architecture.md lists for a step. Those in italics belong to drafting."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    [path] = re.findall(r"### The path of a step\n(.*?)\n###", text, re.DOTALL)
    modules = {*re.findall(r"`([\w/]+\.py)`", path)} - {"tests/engine/test_step_path.py"}
    return modules if drafts else modules - {*re.findall(r"\*`([\w/]+\.py)`\*", path)}


@pytest.mark.parametrize(
    ("drafter", "drafting", "count"),
    [
        ("none", Drafting(), 12),
        (PAIR / "drafter", Drafting(None), 16),
    ],
    ids=["plain", "chain"],
)
def test_a_step_passes_the_documented_modules(drafter: str | Path, drafting: Drafting, count: int) -> None:
    modules = modules_of_a_step(drafter, drafting)
    assert modules == documented_modules(drafter != "none") and len(modules) == count, sorted(modules)
