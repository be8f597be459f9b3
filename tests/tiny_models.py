"""Tiny random models that the tests share. Their answers are nonsense, which leaves the decoding of nonsense exact."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork
from blockdraft.drafters.eagle3.network import Eagle3Config, Eagle3Network
from blockdraft.drafters.mtp.network import MTPConfig, MTPNetwork
from blockdraft.formats import Checkpoint, find_layout
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.machine import cache_folder
from blockdraft.nn.draft_config import DraftConfig, LayerAttention
from blockdraft_diffusion.flow.network import FlowConfig, FlowNetwork
from blockdraft_medusa.network import MedusaConfig, MedusaNetwork
from blockdraft_train.data.documents import Document
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HIDDEN_SIZE = 32
TARGET_LAYERS = 3
MAX_CONTEXT = 256


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without training: one entry a byte, a few merges."""
    entries = SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("Ã", "¼")]
    entries += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 3 layers with a byte-level tokenizer, a chat template and a context of 256 tokens."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_coder(folder: Path, target_dir: Path, more_tokens: Sequence[str] = ()) -> Path:
    """Write a random model with Qwen2.5-Coder's tokens for infills, and return its folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(FIM, special_tokens=True)
    tokenizer.add_tokens(list(more_tokens))
    config = AutoConfig.from_pretrained(target_dir, vocab_size=len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # other weights may write a separator at once, which ends an infill
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_drafter_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """A random DFlash drafter of 2 layers and blocks of 8 for `tiny_target_dir`."""
    folder = tmp_path_factory.mktemp("tiny") / "drafter"
    tokenizer = tiny_tokenizer()
    config = DraftConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=len(tokenizer),
        block_size=8,
        mask_token_id=tokenizer.mask_token_id,
        target_layers=(0, 1),
        num_target_layers=TARGET_LAYERS,
        rope_theta=10000.0,
        layers=(LayerAttention(causal=False, window=None),) * 2,
        max_position_embeddings=MAX_CONTEXT,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = DFlashNetwork(config)
    write_checkpoint(folder, config, network.state_dict())
    return folder


@pytest.fixture(scope="session")
def tiny_dflash2_dir(tmp_path_factory: pytest.TempPathFactory, tiny_drafter_dir: Path) -> Path:
    """`tiny_drafter_dir` as DFlash2, with random convolutions of three slots and a selector that matters."""
    folder = tmp_path_factory.mktemp("tiny") / "dflash2"
    v1, tensors = read_checkpoint(tiny_drafter_dir)
    config = DFlash2Config(**vars(v1), conv_kernel_size=3, conv_group_size=8, selector_rank=4, selector_top_k=5)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        network = DFlash2Network(config)
        for name, weight in network.state_dict().items():
            if name not in tensors:
                weight += torch.randn_like(weight) * (1.0 if name.endswith("codebook") else 0.2)
    network.load_state_dict(tensors, strict=False)
    write_checkpoint(folder, config, network.state_dict())
    return folder


@pytest.fixture(scope="session")
def tiny_dspark_dir(tmp_path_factory: pytest.TempPathFactory, tiny_drafter_dir: Path) -> Path:
    """`tiny_drafter_dir` as DSpark, with random heads that matter."""
    folder = tmp_path_factory.mktemp("tiny") / "dspark"
    v1, tensors = read_checkpoint(tiny_drafter_dir)
    config = DSparkConfig(**vars(v1), markov_rank=4)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        network = DSparkNetwork(config)
        for name, weight in network.state_dict().items():
            if name not in tensors:
                weight += torch.randn_like(weight)
    network.load_state_dict(tensors, strict=False)
    write_checkpoint(folder, config, network.state_dict())
    return folder


@pytest.fixture(scope="session")
def tiny_flow_dir(tmp_path_factory: pytest.TempPathFactory, tiny_drafter_dir: Path) -> Path:
    """`tiny_drafter_dir` as a flow map of two passes, on which noise and times have an effect."""
    folder = tmp_path_factory.mktemp("tiny") / "flow"
    v1, tensors = read_checkpoint(tiny_drafter_dir)
    config = FlowConfig(**vars(v1), noise_std=0.5, diffusion_steps=2)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = FlowNetwork(config)
        for name, weight in network.state_dict().items():
            if name not in tensors:
                weight += 0.2 * torch.randn_like(weight)
    network.load_state_dict(tensors, strict=False)
    write_checkpoint(folder, config, network.state_dict())
    return folder


EAGLE_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": len(tiny_tokenizer()),
    "draft_vocab_size": 120,
    "target_layers": (0, 1),
    "num_target_layers": TARGET_LAYERS,
    "max_position_embeddings": MAX_CONTEXT,
}


@pytest.fixture(scope="session")
def tiny_eagle3_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """A random EAGLE-3 drafter for `tiny_target_dir` that drafts at most 5 tokens, among 120 of the vocabulary."""
    folder = tmp_path_factory.mktemp("tiny") / "eagle3"
    _write_eagle(folder, Eagle3Config(**EAGLE_SHAPE, block_size=6), 5)
    return folder


@pytest.fixture(scope="session")
def eagle3_of_three_target_layers(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """As `tiny_eagle3_dir`, with as many target layers as llama.cpp reads."""
    folder = tmp_path_factory.mktemp("tiny") / "eagle3-target layers"
    _write_eagle(folder, Eagle3Config(**EAGLE_SHAPE | {"target_layers": (0, 1, 1)}, block_size=6), 5)
    return folder


def _write_eagle(folder: Path, config: Eagle3Config, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Eagle3Network(config)
        network.keep(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
    find_layout("eagle3").write(folder, Checkpoint(config, network.state_dict()))


@pytest.fixture(scope="session")
def tiny_medusa_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """Three random Medusa heads of two blocks for `tiny_target_dir`."""
    folder = tmp_path_factory.mktemp("tiny") / "medusa"
    config = MedusaConfig(HIDDEN_SIZE, len(tiny_tokenizer()), TARGET_LAYERS, num_heads=3, num_layers=2)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = MedusaNetwork(config)
        tensors = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in network.state_dict().items()}
    find_layout("medusa").write(folder, Checkpoint(config, tensors))
    return folder


@pytest.fixture(scope="session")
def tiny_mtp_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """A random MTP head of three steps for `tiny_target_dir`."""
    folder = tmp_path_factory.mktemp("tiny") / "mtp"
    config = MTPConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_CONTEXT,
        vocab_size=len(tiny_tokenizer()),
        num_target_layers=TARGET_LAYERS,
        block_size=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(6)
        network = MTPNetwork(config)
        tensors = {name: weight + 0.2 * torch.randn_like(weight) for name, weight in network.state_dict().items()}
    find_layout("mtp").write(folder, Checkpoint(config, tensors))
    return folder


@pytest.fixture(scope="session")
def tiny_data_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """40 documents of 12 to 30 tokens for `tiny_target_dir`, the answer of each from its middle on."""
    folder = tmp_path_factory.mktemp("tiny") / "data"
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(tiny_tokenizer())})
    writer.begin()
    random = torch.Generator().manual_seed(3)
    for row in range(40):
        length = int(torch.randint(12, 31, (), generator=random))
        tokens = torch.randint(5, 200, (length,), generator=random)
        writer.add(row, [Document(tokens, torch.arange(length) >= length // 2)])
    writer.finish()
    return folder


@pytest.fixture(scope="session")
def scatter() -> Callable[..., Any]:
    """`scatter(store, (first, capacity), ...)` opens rows at these places of a cache or a drafter's state that was made
    with one row, which goes, and returns them."""

    def scattered(store: Any, *places: tuple[int, int]) -> Any:
        store.close(0)
        for row, capacity in places:
            store.open(row, capacity)
        return store.of([row for row, _ in places])

    return scattered


@pytest.fixture
def fresh_accelerator() -> Iterator[Callable[[], None]]:
    """Let the test begin without a state of Accelerate's, leave none, and provide a function that drops it."""
    _forget_accelerator()
    yield _forget_accelerator
    _forget_accelerator()


def _forget_accelerator() -> None:
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Provide `torch.set_num_threads`, and restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, so that what it learns of costs stays there; compiled libraries are shared."""
    libraries = cache_folder() / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "libraries").symlink_to(libraries)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(folder))
    return folder
