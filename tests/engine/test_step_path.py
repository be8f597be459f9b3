"""The modules that one decode step enters, as docs/architecture.md lists them."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import blockdraft
from blockdraft.drafters import load_drafter
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.engine import Engine
from blockdraft.formats import Checkpoint, find_layout
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


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 drafter whose weights have the dtype and head size of the pair's target."""
    folder = tmp_path_factory.mktemp("eagle3") / "drafter"
    sizes = {"hidden_size": 224, "intermediate_size": 576, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 64, "vocab_size": 4096, "draft_vocab_size": 64, "num_target_layers": 8, "block_size": 5}
    network = Eagle3Network(Eagle3Config(target_layers=(0, 1), max_position_embeddings=256, **sizes))
    network.keep(torch.arange(64))
    tensors = network.to(torch.bfloat16).state_dict()
    find_layout("eagle3").write(folder, Checkpoint(network.config, tensors))
    return folder


def documented_modules(kind: str | None) -> set[str]:
    """Return the files that docs/architecture.md lists for a step. Those in italics belong to drafting with DFlash."""
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    [path] = re.findall(r"### The path of a step\n(.*?)\n###", text, re.DOTALL)
    modules = {*re.findall(r"`([\w/]+\.py)`", path)} - {"tests/engine/test_step_path.py"}
    if kind == "dflash":
        return modules
    own = {"drafters/eagle3/drafter.py", "kernels/cpu/compiled_runner.py"} if kind == "eagle3" else set[str]()
    return modules - {*re.findall(r"\*`([\w/]+\.py)`\*", path)} | own


@pytest.mark.parametrize(
    ("kind", "count"),
    [(None, 12), ("dflash", 15), ("eagle3", 14)],
)
def test_a_step_passes_the_documented_modules(kind: str | None, count: int, eagle3: Path) -> None:
    drafter = {None: "none", "dflash": PAIR / "drafter", "eagle3": eagle3}[kind]
    modules = modules_of_a_step(drafter, Drafting(None) if kind else Drafting())
    assert modules == documented_modules(kind) and len(modules) == count, sorted(modules)
