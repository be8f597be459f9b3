"""z-lab's own package as outside judge: it loads our checkpoints, decodes to the same tokens, and accepts as we do."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.engine import Engine
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets.hf import HFTarget
from blockdraft.types import Drafting, SamplingParams

dflash = pytest.importorskip("dflash.model", reason="needs the extra `peers`")
pytestmark = pytest.mark.peers

PAIR = Path(__file__).parents[2] / "src/blockdraft/pair/tiny"
QUESTIONS = [
    "A robe needs 3 bolts of blue cloth and twice as much white cloth. How many bolts does it need in all?",
    "Sara has 24 stickers. She gives 6 to each of her 3 friends. How many stickers does she have left?",
    "Write a function that returns the sum of the even numbers of a list.",
]


def questions() -> list[str]:
    """Some of our own, and benchmark prompts where `BLOCKDRAFT_DATA` tells where they are."""
    found = list(QUESTIONS)
    data = os.environ.get("BLOCKDRAFT_DATA")
    for name in ("gsm8k", "humaneval") if data else ():
        with Path(str(data), f"prompts/{name}.jsonl").open(encoding="utf-8") as file:
            found += [json.loads(line)["turns"][0] for line in file][:20]
    return found


def both(
    target: HFTarget, draft_folder: Path, prompt: list[int], block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)  # its timer asks for a GPU
    [architecture] = json.loads((draft_folder / "config.json").read_text())["architectures"]
    draft = getattr(dflash, architecture).from_pretrained(draft_folder, dtype=torch.float32).eval()
    model: PreTrainedModel = target.model
    stops = sorted(target.eos_token_ids)
    theirs = dflash.dflash_generate(
        draft, model, torch.tensor([prompt]), 96, stops, block_size=block_size, return_stats=True
    )
    drafter = load_drafter(draft_folder, target=target)
    [ours] = Engine(target, drafter, drafting=Drafting(block_size)).generate([prompt], SamplingParams(96))
    assert ours.token_ids == theirs.output_ids[0, len(prompt) :].tolist()
    assert ours.stats.committed == theirs.acceptance_lengths


@pytest.fixture(scope="module")
def bundled_dflash2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled drafter as DFlash2, its new modules disturbed so little that it still draft tokens well."""
    folder = tmp_path_factory.mktemp("peers") / "dflash2"
    v1, tensors = read_checkpoint(PAIR / "drafter")
    config = DFlash2Config(**vars(v1), conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = DFlash2Network(config)
        network.load_state_dict(tensors, strict=False)
        for name, weight in network.state_dict().items():
            if name not in tensors:
                weight += torch.randn_like(weight) * (0.3 if "codebook" in name else 0.01)
    write_checkpoint(folder, config, network.state_dict())
    return folder


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("question", questions())
def test_bundled_pair(question: str, version: int, bundled_dflash2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    folder = {1: PAIR / "drafter", 2: bundled_dflash2_dir}[version]
    both(HFTarget(model, tokenizer), folder, prompt, None, monkeypatch)


@pytest.mark.parametrize("block_size", [None, 3])
def test_random_pair(
    tiny_target_dir: Path, tiny_drafter_dir: Path, block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    both(HFTarget(model), tiny_drafter_dir, [7, 60, 33, 12, 9], block_size, monkeypatch)


@pytest.mark.parametrize("block_size", [None, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_random_dflash2_pair(
    tiny_target_dir: Path,
    tiny_dflash2_dir: Path,
    tmp_path: Path,
    block_size: int | None,
    scaled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, tensors = read_checkpoint(tiny_dflash2_dir)
    if scaled:  # all that changes the logits, and windows that are not causal, as z-lab's files have them
        layers = (LayerAttention(causal=False, window=6),) * 2
        config = replace(config, output_multiplier=0.3, final_logit_softcapping=2.0, layers=layers)
    write_checkpoint(tmp_path / "draft", config, tensors)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    both(HFTarget(model), tmp_path / "draft", [7, 60, 33, 12, 9], block_size, monkeypatch)


def test_the_distributions_of_the_selector(tiny_target_dir: Path, tiny_dflash2_dir: Path) -> None:
    config, tensors = read_checkpoint(tiny_dflash2_dir)
    assert isinstance(config, DFlash2Config)
    ours = DFlash2Network(config)
    ours.load_state_dict(tensors)
    theirs = dflash.DFlash2DraftModel.from_pretrained(tiny_dflash2_dir, dtype=torch.float32).eval()
    head = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32).lm_head
    torch.manual_seed(0)
    hidden, anchor = torch.randn(3, 7, config.hidden_size), torch.tensor([5, 6, 7])
    with torch.no_grad():
        path, candidates, q = theirs.propose(hidden, anchor, head, 0.7)
        ids, scores = ours.lattice(hidden, ours.adjust_logits(head(hidden)), anchor)
        dists = (scores / 0.7).softmax(dim=-1)
    before = torch.cat([torch.zeros_like(path[:, :1]), (ids == path[..., None]).int().argmax(dim=-1)[:, :-1]], dim=1)
    for row in range(3):
        for slot in range(7):
            dist = torch.zeros(config.vocab_size).scatter(0, ids[row, slot], dists[row, slot, before[row, slot]])
            expected = torch.zeros(config.vocab_size).scatter(0, candidates[row, slot], q[row, slot])
            torch.testing.assert_close(dist, expected)
