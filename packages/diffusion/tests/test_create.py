"""Creation of block-diffusion models, and reading and writing their folders."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from blockdraft import targets
from blockdraft.errors import UsageError
from blockdraft.targets import TargetText, load_target
from blockdraft_diffusion.create import Created, convert, new_model
from blockdraft_diffusion.dit import DiT, DiTConfig
from blockdraft_diffusion.folder import load_model, write_model
from blockdraft_diffusion.likelihood import likelihood
from blockdraft_diffusion.model import DiffusionConfig, DiffusionModel
from blockdraft_diffusion.sampler import Sampler
from blockdraft_diffusion.settings import ConvertSettings, NewSettings, SampleSettings
from blockdraft_diffusion.text import TextTokens


@pytest.fixture
def source(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny target."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "source"))


def change(file: Path, **values: Any) -> None:
    """Change values of a JSON file; None deletes the key."""
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in (raw | values).items() if value is not None}))


def without_mask_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)


def test_convert_keeps_the_weights(tiny_target_dir: Path, tmp_path: Path) -> None:
    created = convert(tiny_target_dir, tmp_path / "out", ConvertSettings(block_size=8, token_shift=False))
    assert (created.mask_token, created.config.mask_token_id, created.is_new) == ("<|mask|>", 3, False)
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("a2d-qwen3", ["A2DQwen3LMHeadModel"])
    assert (raw["block_size"], raw["mask_token_id"], raw["token_shift"]) == (8, 3, False)
    model = load_model(tmp_path / "out", "cpu")
    assert model.config == created.config
    theirs = Qwen3ForCausalLM.from_pretrained(tiny_target_dir).state_dict()
    ours = model.network.state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert model.text.tokenizer is not None and model.text.eos_token_ids == {2}
    assert model.text.tokenizer.chat_template is not None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]  # no other files


def test_converted_model_is_not_a_target(folder_of: Any) -> None:
    with pytest.raises(UsageError, match="holds a block-diffusion model, which is no target"):
        load_target(folder_of())


def test_mask_token_is_added_to_the_tokenizer(source: Path, tmp_path: Path) -> None:
    without_mask_token(source)
    created = convert(source, tmp_path / "out")
    assert (created.is_new, created.mask_token, created.config.mask_token_id) == (True, "<|mask_0|>", 265)
    model = load_model(tmp_path / "out", "cpu")
    assert model.network.vocab_size == 266 and model.text.tokenizer.mask_token_id == 265
    table = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    before = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table[:265], before)
    assert 0.5 < table[265].norm() / before.norm(dim=1).mean() < 2  # not close to zero
    again = convert(source, tmp_path / "again")
    assert created == again
    assert torch.equal(load_file(tmp_path / "again/model.safetensors")["model.embed_tokens.weight"], table)


def test_new_mask_token_uses_a_spare_embedding(source: Path, tmp_path: Path) -> None:
    without_mask_token(source)
    config = Qwen3Config.from_pretrained(source, vocab_size=280)
    with torch.random.fork_rng():
        Qwen3ForCausalLM(config).save_pretrained(source)
    created = convert(source, tmp_path / "out")
    assert created.config.mask_token_id == 265 and load_model(tmp_path / "out", "cpu").network.vocab_size == 280


def test_mask_embedding_close_to_zero_is_sampled_again(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][3] *= 1e-6
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "out")
    table = load_file(tmp_path / "out/model.safetensors")["model.embed_tokens.weight"]
    assert table[3].norm() > 0.3 * table.norm(dim=1).mean()
    assert torch.equal(table[4:], tensors["model.embed_tokens.weight"][4:])


def test_mask_token_that_is_the_padding_token_is_replaced(source: Path, tmp_path: Path) -> None:
    change(source / "tokenizer_config.json", pad_token="<|mask|>")
    created = convert(source, tmp_path / "out")
    assert created.is_new and created.config.mask_token_id == 265


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_token_id": 0}, "mask_token_id is 0, the padding token; give a token that no text contains"),
        ({"mask_token_id": 2}, "mask_token_id is 2, an end token"),
        ({"mask_token_id": 265}, "mask_token_id must be between 0 and 264, got 265"),
        ({"block_size": 300}, "block_size must be at most 256, the context of .*, got 300"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str, tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tiny_target_dir, tmp_path / "out", ConvertSettings(**settings))
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_converted(source: Path, folder_of: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        convert(source, source)
    change(source / "config.json", use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 3)
    with pytest.raises(UsageError, match="cannot be converted: it has sliding windows"):
        convert(source, tmp_path / "out")
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        convert(source, tmp_path / "out")


# The folder


@pytest.fixture
def folder(folder_of: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder_of(), tmp_path / "model"))


def test_write_and_load(model_of: Any, folder: Path) -> None:
    model = load_model(folder, "cpu", block_size=2)
    tensors = {name: weight + 1 for name, weight in model.network.state_dict().items()}
    write_model(model, tensors, folder)  # replaces the folder
    again = load_model(folder, "cpu")
    assert again.config.block_size == 2 and again.text.eos_token_ids == model.text.eos_token_ids
    assert all(torch.equal(weight, tensors[name]) for name, weight in again.network.state_dict().items())
    write_model(model, {name: weight.bfloat16() for name, weight in tensors.items()}, folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(folder, "cpu", "bfloat16").network.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("make", "loader"), [(convert, "load_target_text"), (new_model, "load_text_with")])
def test_folder_of_another_process_is_kept(
    make: Any, loader: str, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may create the folder while the tokenizer loads."""
    out, load = tmp_path / "out", getattr(targets, loader)

    def load_slowly(*args: Any) -> Any:
        out.mkdir()
        (out / "file").touch()
        return load(*args)

    monkeypatch.setattr(f"blockdraft_diffusion.create.{loader}", load_slowly)
    with pytest.raises(UsageError, match="out exists already; choose another folder"):
        make(tiny_target_dir, out)
    assert [file.name for file in out.iterdir()] == ["file"]


def test_layouts_of_other_projects(folder: Path) -> None:
    """SDAR writes the block size, dllm does not; neither writes the other keys."""
    change(folder / "config.json", block_size=None, mask_token_id=None, token_shift=None)
    with pytest.raises(UsageError, match="config.json lacks block_size; write it there, or give --block-size"):
        load_model(folder, "cpu")
    config = load_model(folder, "cpu", block_size=4).config
    assert (config.mask_token_id, config.token_shift) == (3, False)
    change(folder / "config.json", model_type="sdar", block_size=16)
    assert load_model(folder, "cpu").config.block_size == 16


def test_missing_or_unknown_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong in ({name: None}, {name: tensors[name][:-1].clone()}, {"model.extra": tensors[name].clone()}):
        changed = {key: value for key, value in (tensors | wrong).items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(UsageError, match=f"1 tensors do not fit the configuration: {next(iter(wrong))}"):
            load_model(folder, "cpu")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UsageError, match="model.safetensors cannot be read: it is corrupt or cut short"):
        load_model(folder, "cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no \*.safetensors"):
        load_model(folder, "cpu")


def test_mask_token_may_be_the_padding_token(folder: Path) -> None:
    """The paper's tokenizer has such a mask token. Texts are never padded."""

    def completion() -> tuple[int, ...]:
        sampler = Sampler(load_model(folder, "cpu"), SampleSettings(max_new_tokens=8, ignore_eos=True))
        chunks = sampler.stream([[20, 21, 22, 23, 24], [30, 31]])
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    before = completion()
    change(folder / "tokenizer_config.json", pad_token="<|mask|>")
    assert completion() == before and 3 not in before


def test_invalid_folders(folder: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has a model of type 'qwen3', which is not a block-diffusion model"):
        load_model(tiny_target_dir)
    with pytest.raises(UsageError, match="has no config.json of a model"):
        load_model(tmp_path / "nowhere")
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    change(folder / "config.json", hidden_size="a")
    with pytest.raises(UsageError, match="config.json is invalid: .*'hidden_size'"):
        load_model(folder, "cpu")
    change(folder / "config.json", hidden_size=size, mask_token_id=400)
    with pytest.raises(UsageError, match="mask_token_id is 400 in .*, and the model has 265 tokens"):
        load_model(folder, "cpu")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="has no tokenizer"):
        load_model(folder, "cpu")


# The paper's layout

PAPER = {
    "architectures": ["BD3LM"],
    "model_type": "bd3lm",
    "block_size": 4,
    "model_length": 32,
    "hidden_dim": 24,
    "n_blocks": 2,
    "n_heads": 3,
    "cond_dim": 8,
    "vocab_size": 270,
    "time_conditioning": False,
}


@pytest.fixture
def paper(tiny_target_dir: Path, tmp_path: Path) -> DiffusionModel:
    """Write a model of this layout. Its tokenizer has no mask token, and the padding token is the end token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_dir)
    tokenizer.mask_token, tokenizer.pad_token = None, tokenizer.eos_token
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = DiT(DiTConfig(**{field.name: PAPER[field.name] for field in fields(DiTConfig)}))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    text = TargetText(None, tokenizer, 32, frozenset([tokenizer.eos_token_id]))
    model = DiffusionModel(network.eval().requires_grad_(False), DiffusionConfig(4, 269, False), text, PAPER)
    write_model(model, network.state_dict(), tmp_path / "paper")
    return model


def test_paper_layout_loads(paper: DiffusionModel, tmp_path: Path) -> None:
    model = load_model(tmp_path / "paper", "cpu")
    assert model.config == paper.config and model.text.max_context == 32 and model.text.eos_token_ids == {2}
    tokens, positions = torch.arange(12)[None] + 20, torch.arange(12)[None]
    expected, actual = (m.network.logits(m.network.hidden(tokens, positions)) for m in (paper, model))
    assert torch.equal(expected, actual)
    [chunk] = list(Sampler(model, SampleSettings(max_new_tokens=4, ignore_eos=True)).stream([[20, 21, 22, 23]]))
    assert len(chunk.token_ids) == 4 and 269 not in chunk.token_ids
    bits = likelihood(model, [TextTokens(tokens[0], tokens[0] > 0)]).bits_per_token
    assert 0 < bits < 1000


def test_paper_layout_has_defaults(paper: DiffusionModel, tmp_path: Path) -> None:
    """The published folders have no mask token and no token shift. The mask token is the last token."""
    change(tmp_path / "paper/config.json", mask_token_id=None, token_shift=None)
    assert load_model(tmp_path / "paper", "cpu").config == paper.config
    change(tmp_path / "paper/config.json", time_conditioning=True)
    with pytest.raises(UsageError, match="time_conditioning is True, which is not supported"):
        load_model(tmp_path / "paper", "cpu")
    change(tmp_path / "paper/config.json", time_conditioning=False, n_blocks=3)
    with pytest.raises(UsageError, match="10 tensors do not fit the configuration"):
        load_model(tmp_path / "paper", "cpu")
    for file in (tmp_path / "paper").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UsageError, match="has no tokenizer; copy the tokenizer of GPT-2 there"):
        load_model(tmp_path / "paper", "cpu")


SMALL = {"layers": 2, "hidden_size": 24, "heads": 3, "context": 32, "block_size": 4}


def test_new_model(tiny_target_dir: Path, tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("same", 0), ("other", 1)):
        created = new_model(tiny_target_dir, tmp_path / name, NewSettings(seed=seed, **SMALL))  # type: ignore[arg-type]
        assert created == Created(DiffusionConfig(4, 3, False), "<|mask|>", False)
    model, same, other = (load_model(tmp_path / name, "cpu") for name in ("first", "same", "other"))
    assert isinstance(model.network, DiT) and model.config == created.config
    assert (model.network.vocab_size, model.text.max_context, model.text.eos_token_ids) == (265, 32, {2})
    weights, same_weights, other_weights = (m.network.state_dict() for m in (model, same, other))
    assert all(torch.equal(weight, same_weights[name]) for name, weight in weights.items())
    assert not all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
    [chunk] = list(Sampler(model, SampleSettings(max_new_tokens=4, seed=0, ignore_eos=True)).stream([[5, 6, 7, 8]]))
    assert len(chunk.token_ids) == 4 and 3 not in chunk.token_ids


def test_new_model_in_the_paper_layout(tiny_target_dir: Path, tmp_path: Path) -> None:
    new_model(tiny_target_dir, tmp_path / "out", NewSettings(**SMALL))  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["model_type"] == "bd3lm" and raw["n_blocks"] == 2 and raw["cond_dim"] == 64 and raw["vocab_size"] == 265
    weights = load_model(tmp_path / "out", "cpu").network.state_dict()
    assert not weights["backbone.output_layer.linear.weight"].any()  # all tokens are equally likely
    assert weights["backbone.vocab_embed.embedding"].any()


def test_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="bare has no tokenizer; give a folder with one"):
        new_model(tmp_path / "bare", tmp_path / "out")
