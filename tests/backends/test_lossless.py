"""MLX and JAX decode the same tokens in the same steps as the native backend, and sample exact distributions."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import smollm2
import torch
from backend_targets import PACKAGES, load
from exact_distribution import LENGTH, NOISE, PROMPT, ROWS, V, surprise, write_model
from pair_chats import chats
from transformers import LlamaForCausalLM

from blockdraft.decode.proposal import chain_parents
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.engine import Completion, Engine
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, layouts
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.foreign_tensor import in_torch
from blockdraft.targets import Target, embedding_and_head, load_target
from blockdraft.types import Drafting, SamplingParams

PROMPTS = [[7, 60, 33, 12, 9], [5], [40, 41, 42, 40, 41], [(7 * i + 3) % 60 + 4 for i in range(70)]]
PARAMS = [SamplingParams(14, (0.0, 0.0, 0.8, 0.0)[row], seed=row, ignore_eos=True) for row in range(4)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in PACKAGES])
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


@pytest.fixture(scope="module")
def target(backend: str, tiny_target_dir: Path) -> Target:
    return load(tiny_target_dir, backend)


def complete(target: Target, drafter: Any, drafting: Drafting | None = None, batch: int = 4) -> list[Completion]:
    with Engine(target, load_drafter(drafter, target=target), batch, drafting or Drafting(None)) as engine:
        return [completion.checked() for completion in engine.generate(PROMPTS, PARAMS)]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def steps_of(completions: Sequence[Completion]) -> list[list[int]]:
    """Return the number of tokens that each step committed, per completion."""
    return [completion.stats.committed for completion in completions]


@pytest.fixture(scope="module")
def native(tiny_target_dir: Path) -> Target:
    return load(tiny_target_dir, "native")


@pytest.fixture(scope="module")
def plain(native: Target) -> list[list[int]]:
    return tokens_of(complete(native, "none", batch=1))


@pytest.mark.parametrize("batch", [1, 4])
def test_plain_decoding(backend: str, target: Target, plain: list[list[int]], batch: int) -> None:
    assert target.backend == backend and target.has_trees
    assert tokens_of(complete(target, "none", batch=batch)) == plain


@pytest.fixture(scope="module")
def tiny_reduced_dir(tmp_path_factory: pytest.TempPathFactory, tiny_drafter_dir: Path, native: Target) -> Path:
    """Write the DFlash drafter with an output head for every other token."""
    folder, [config, tensors] = tmp_path_factory.mktemp("reduced") / "drafter", read_checkpoint(tiny_drafter_dir)
    embedding, head = embedding_and_head(native)
    kept = torch.arange(0, native.vocab_size, 2)
    checkpoint = Checkpoint(config, tensors, Borrowed(embedding, head[kept], kept))
    layouts()["speculators"].write(folder, checkpoint, DrafterTarget("target", ("Qwen3ForCausalLM",)))
    return folder


@pytest.mark.parametrize("drafting", [Drafting(None), Drafting(tree_budget=9)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["drafter", "reduced", "dflash2", "dspark", "eagle3", "medusa", "mtp"])
def test_drafting_changes_no_output(
    target: Target,
    native: Target,
    kind: str,
    drafting: Drafting,
    plain: list[list[int]],
    request: pytest.FixtureRequest,
) -> None:
    """Also accepts the same draft tokens as the native backend in each step."""
    folder = request.getfixturevalue(f"tiny_{kind}_dir")
    ours, theirs = (complete(model, folder, drafting) for model in (target, native))
    assert tokens_of(ours) == plain
    assert steps_of(ours) == steps_of(theirs)


def test_fifty_chats_of_the_bundled_pair_take_the_same_steps(backend: str) -> None:
    """Drafts chains of 16, one chat at a time; every fifth chat is sampled."""
    params = [SamplingParams(24, 0.0 if seed % 5 else 1.3, seed=seed) for seed in range(50)]
    completions = []
    for name in (backend, "native"):
        target = load(ROOT / "src/blockdraft/pair/tiny/target", name)
        with Engine(target, load_drafter("bundled", target=target), 1, Drafting(None)) as engine:
            requests = zip(chats(50), params, strict=True)
            completions.append([engine.generate([prompt], sampling)[0] for prompt, sampling in requests])
    ours, theirs = completions
    assert tokens_of(ours) == tokens_of(theirs) and steps_of(ours) == steps_of(theirs)
    assert sum(map(len, tokens_of(ours))) > 2 * sum(map(len, steps_of(ours)))


@pytest.fixture(scope="module")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2.write_folder(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.filterwarnings("ignore:os.fork")  # of pip, which knows nothing of JAX's threads
def test_smollm2_and_its_drafter_take_the_same_steps(backend: str, smollm2_dir: Path) -> None:
    """Decodes few tokens, since a matrix product of a real model takes MLX a tenth of a second on a CPU."""
    completions = []
    for name in (backend, "native"):
        target = load(smollm2_dir, name)
        with Engine(target, load_drafter(smollm2.DRAFTER, target=target), 1, Drafting(4)) as engine:
            completions.append([engine.generate([prompt], SamplingParams(12))[0] for prompt in chats(3)])
    ours, theirs = completions
    assert tokens_of(ours) == tokens_of(theirs) and steps_of(ours) == steps_of(theirs)
    assert max(map(max, steps_of(ours))) > 1


def write_drafter(folder: Path) -> Path:
    """Write a random DFlash drafter for the model of `write_model`."""
    layers = (LayerAttention(False, None),)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": V, "block_size": LENGTH}
    shape |= {
        "mask_token_id": 2,
        "target_layers": (0,),
        "num_target_layers": 1,
        "rope_theta": 10000.0,
        "layers": layers,
    }
    with torch.random.fork_rng():
        torch.manual_seed(13)  # a seed whose draft tokens are often right and often wrong
        config = DraftConfig(**shape)
        write_checkpoint(folder, config, DFlashNetwork(config).state_dict())
    return folder


@pytest.mark.parametrize(
    "drafting",
    [Drafting(None, sampled=True), Drafting(tree_budget=6, sampled=True), Drafting(None)],
    ids=["sampled chain", "sampled tree", "likeliest chain"],
)
def test_sampled_outputs_have_the_distribution_of_the_target(backend: str, drafting: Drafting, tmp_path: Path) -> None:
    target = load(write_model(tmp_path / "target", 2), backend)
    drafter = load_drafter(write_drafter(tmp_path / "drafter"), target=target)
    params = [SamplingParams(LENGTH, 1.0, seed=seed, ignore_eos=True) for seed in range(ROWS)]
    with Engine(target, drafter, 500, drafting) as engine:
        completions = engine.generate([PROMPT] * ROWS, params)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert abs(surprise([*map(tuple, tokens_of(completions))], model)) < NOISE
    accepted = [count > 1 for steps in steps_of(completions) for count in steps]
    assert 0.1 < sum(accepted) / len(accepted) < 0.9


def test_bfloat16(backend: str, native: Target, tiny_target_dir: Path, tiny_dspark_dir: Path) -> None:
    half = load_target(tiny_target_dir, dtype="bfloat16", device="cpu", backend=backend)
    ours, theirs = (
        in_torch(model.forward(torch.tensor([PROMPTS[0]]), chain_parents(1, 5), model.new_cache(1, 8)).logits)
        for model in (half, native)
    )
    assert ours.dtype == half.dtype == torch.bfloat16
    assert float((ours.float() - theirs).abs().max()) < 0.05 * float(theirs.abs().max())
    with Engine(half, load_drafter(tiny_dspark_dir, target=half), 1, Drafting(None)) as engine:
        [completion] = engine.generate([PROMPTS[0]], PARAMS[0])
    assert len(completion.token_ids) == 14 and any(completion.stats.drafted)


def test_chat_turns_reuse_the_prefix_of_earlier_turns(target: Target, native: Target, tiny_drafter_dir: Path) -> None:
    """Prefills 16 tokens at a time, next to another request."""
    drafter = load_drafter(tiny_drafter_dir, target=target)
    with Engine(target, drafter, 2, Drafting(tree_budget=6), prefix_tokens=400, prefill_tokens=16) as engine:
        chat = list(PROMPTS[3])
        for _ in range(3):
            [expected] = Engine(native).generate([chat], PARAMS[0])
            [completion, _] = engine.generate([chat, PROMPTS[0]], PARAMS[0])
            assert completion.token_ids == expected.token_ids
            chat += [*expected.token_ids, 8, 9]
        assert completion.stats.remembered > len(PROMPTS[3])


def test_sampled_drafts_are_reproducible_behind_a_cached_prefix(target: Target, tiny_drafter_dir: Path) -> None:
    params = [SamplingParams(12, 1.0, seed=row, ignore_eos=True) for row in range(2)]
    drafter = load_drafter(tiny_drafter_dir, target=target)
    with Engine(target, drafter, 2, Drafting(None, sampled=True), prefix_tokens=400, prefill_tokens=16) as engine:
        first, again = (engine.generate([PROMPTS[3]] * 2, params) for _ in range(2))
    assert tokens_of(first) == tokens_of(again)
    assert again[1].stats.remembered and max(map(max, steps_of(first))) > 1


def test_cancelled_requests_leave_others_alone(target: Target, tiny_drafter_dir: Path, plain: list[list[int]]) -> None:
    with Engine(target, load_drafter(tiny_drafter_dir, target=target), 2) as engine:
        long = engine.submit(PROMPTS[1], SamplingParams(150, ignore_eos=True))
        other = engine.submit(PROMPTS[0], PARAMS[0])
        long.cancel()
        assert other.result().checked().token_ids == plain[0]
        assert len(long.result().token_ids) < 150
        assert engine.generate([PROMPTS[3]], PARAMS[3])[0].token_ids == plain[3]  # in the freed KV slots


def test_threads_share_a_target(target: Target, tiny_drafter_dir: Path, plain: list[list[int]]) -> None:
    outputs: dict[int, Any] = {}

    def run(number: int) -> None:
        outputs[number] = tokens_of(complete(target, tiny_drafter_dir))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {0: plain, 1: plain}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(14, logit_bias={7: 3.0}),
        SamplingParams(14, repetition_penalty=1.3),
        SamplingParams(14, 0.8, seed=2, frequency_penalty=0.5, top_k=20),
        SamplingParams(14, 1.0, seed=3, min_p=0.1),
        SamplingParams(14, 1.0, seed=3, top_p=0.8),
    ],
    ids=["bias", "repetition penalty", "frequency penalty and top-k", "min-p", "top-p"],
)
def test_sampling_parameters(target: Target, native: Target, tiny_drafter_dir: Path, params: SamplingParams) -> None:
    completions = []
    for model in (target, native):
        with Engine(model, load_drafter(tiny_drafter_dir, target=model), 2, Drafting(tree_budget=6)) as engine:
            completions.append(engine.generate(PROMPTS[:2], params))
    ours, theirs = ([completion.checked() for completion in group] for group in completions)
    assert tokens_of(ours) == tokens_of(theirs)
    assert any(drafted for completion in ours for drafted in completion.stats.drafted)
