"""Short convolutions of our own decoder: sequences may be cut, copied and stored at any token, and share prefixes."""

from pathlib import Path

import pytest
import torch
from gguf_models import MODELS, model_of
from gguf_writer import write_gguf
from tiny_families import write_model
from torch import Tensor

from blockdraft.decode.proposal import chain
from blockdraft.drafters import load_drafter
from blockdraft.drafters.dspark.network import DSparkConfig
from blockdraft.engine import Engine
from blockdraft.formats.architectures import tensor_shapes
from blockdraft.formats.zlab import write_checkpoint
from blockdraft.nn.cache import KVCache
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import Target, load_target
from blockdraft.types import Drafting, SamplingParams

TEXT = torch.randint(3, 61, (1, 30), generator=torch.Generator().manual_seed(1))
WAYS = {"torch": {"compile": "off"}, "exact": {"compile": "off", "exact": True}, "compiled": {"compile": "on"}}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 96, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("lfm2", tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "lfm2.gguf"
    write_gguf(path, model_of("lfm2", **SIZES), "Q8_0", metadata=MODELS["lfm2"][1])
    return path


def read(target: Target, cache: KVCache, tokens: Tensor) -> Tensor:
    """Return the logits of committed tokens."""
    logits = target.forward(tokens, chain(tokens).parents, cache).logits
    cache.commit([range(tokens.size(1))])
    return logits[0]


@pytest.mark.parametrize("way", WAYS)
def test_sequences_can_be_cut_copied_and_stored(folder: Path, way: str) -> None:
    target = load_target(folder, dtype="float32", device="cpu", **WAYS[way])
    assert target.can_truncate
    whole = read(target, target.new_cache(1, 30), TEXT)
    cache = target.new_cache(2, 40).of([0])
    cache.close(40)
    for size in (1, 3, 16, 1):
        read(target, cache, TEXT[:, cache.lengths[0] :][:, :size])
    cache.truncate([10])
    torch.testing.assert_close(read(target, cache, TEXT[:, 10:20]), whole[10:20], atol=1e-4, rtol=1e-4)
    cache.open(45, 35)
    cache.copy(0, 45, 13)
    copy = cache.of([45])
    torch.testing.assert_close(read(target, copy, TEXT[:, 13:15]), whole[13:15], atol=1e-4, rtol=1e-4)
    loaded = target.new_cache(1, 30)
    loaded.load(0, TEXT[0, :17].tolist(), cache.export(0, 17))
    torch.testing.assert_close(read(target, loaded, TEXT[:, 17:]), whole[17:], atol=1e-4, rtol=1e-4)
    if way != "torch":
        loaded.truncate([7])
        assert torch.equal(read(target, loaded, TEXT[:, 7:]), whole[7:])
    assert target.cache_bytes(1, 30) == loaded.nbytes


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}])
def test_drafted_outputs_with_shared_prefixes_are_the_plain_ones(file: Path, options: dict[str, str]) -> None:
    target = load_target(file, device="cpu", compile="on", **options)
    prompts = [[*range(4, 24), *end] for end in ([5, 6, 5, 6], [7], [5, 6, 9])]
    params = [SamplingParams(16, temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.0, 0.8)]
    none, lookup = (load_drafter(name, target=target) for name in ("none", "lookup"))
    plain = [Engine(target, none).generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    for drafting in (Drafting(None), Drafting(tree_budget=8)):
        with Engine(target, lookup, 2, drafting, prefix_tokens=300) as engine:
            for _ in range(2):
                completions = engine.generate(prompts, params)
                assert [completion.checked().token_ids for completion in completions] == plain
            assert all(completion.stats.remembered > 15 for completion in completions)


def test_a_drafter_published_for_the_folder_drafts_for_the_file(file: Path, tmp_path: Path) -> None:
    target = load_target(file, device="cpu", compile="on")
    config = DSparkConfig(
        **SIZES,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        block_size=4,
        mask_token_id=95,
        target_layers=(0, 1, 3),
        num_target_layers=4,
        rope_theta=1e6,
        layers=(LayerAttention(False, None),),
        markov_rank=8,
    )
    random = torch.Generator().manual_seed(0)
    tensors = {name: 0.1 * torch.randn(*shape, generator=random) for name, shape in tensor_shapes(config).items()}
    write_checkpoint(tmp_path / "draft", config, tensors)
    outputs = []
    for drafter in ("none", tmp_path / "draft"):
        engine = Engine(target, load_drafter(drafter, target=target))
        [completion] = engine.generate([[*range(4, 24)]], SamplingParams(12, ignore_eos=True))
        outputs.append(completion.checked().token_ids)
    assert outputs[0] == outputs[1]
    write_checkpoint(tmp_path / "deeper", DSparkConfig(**vars(config) | {"num_target_layers": 5}), tensors)
    with pytest.raises(ValueError, match="num_target_layers|layers"):
        load_drafter(tmp_path / "deeper", target=target)
