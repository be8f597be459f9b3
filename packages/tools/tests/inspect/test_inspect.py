"""Reports on tiny checkpoints of each kind."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.drafters import TINY_DRAFTER, load_drafter
from blockdraft.errors import UsageError
from blockdraft.formats import Borrowed, Checkpoint, DrafterTarget, layouts, read_drafter, speculators, zlab
from blockdraft.formats.trained import Trained
from blockdraft.models import bundled_drafter, known, models_folder
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import BUNDLED, embedding_and_head, load_target
from blockdraft_diffusion.create import new_model
from blockdraft_diffusion.settings import NewSettings
from blockdraft_tools.export import convert, export_gguf, format_for
from blockdraft_tools.inspect import Report, inspect
from blockdraft_tools.inspect.drafters import HEAD_INPUT

Variant = Callable[..., Path]


@pytest.fixture
def variant(tmp_path: Path, tiny_drafter_dir: Path) -> Variant:
    """Writes `tiny_drafter_dir` with another configuration, for this target's fingerprint."""

    def write(
        name: str = "drafter", trained_for: str | None = None, qat_bits: int | None = None, **differences: Any
    ) -> Path:
        config, tensors = zlab.read_checkpoint(tiny_drafter_dir)
        trained = Trained(trained_for, qat_bits)
        zlab.write_checkpoint(tmp_path / name, replace(config, **differences), tensors, trained)
        return tmp_path / name

    return write


def verdicts(report: Report) -> dict[str, bool | None]:
    return {check.name: check.holds for check in report.fits}


def test_bits_of_quantization_aware_training(variant: Variant, tiny_target_dir: Path, tmp_path: Path) -> None:
    few = variant("few", qat_bits=4)
    assert inspect(few).about["rounded_in_training"] == "4 bits"
    file = export_gguf(few, tmp_path / "gguf", tiny_target_dir, "q8_0").drafter
    assert inspect(file).about["rounded_in_training"] == "4 bits"
    assert "rounded_in_training" not in inspect(variant("own")).about


def test_a_drafter(variant: Variant) -> None:
    folder = variant(layers=(LayerAttention(True, 16), LayerAttention(False, None)), trained_for="0123456789abcdef")
    found = inspect(folder)
    assert (found.what, found.layout, found.about["architecture"]) == ("drafter", "zlab", "DFlashDraftModel")
    assert found.wants == {
        "name": None,
        "layers": 3,
        "hidden_size": 32,
        "vocabulary": 265,
        "fingerprint": "0123456789abcdef",
    }
    info = found.conventions
    assert (info["block_size"], info["draft_tokens"]) == (8, 7)
    outputs, entered = [0, 1], [1, 2]
    assert info["target_layers"] == {
        **dict.fromkeys(("blockdraft", "zlab"), outputs),
        **dict.fromkeys(("vllm_sglang", "speculators", "llama_cpp"), entered),
    }
    assert info["layers"] == [{"causal_in_block": True, "window": 16}, {"causal_in_block": False, "window": None}]
    assert info["rope"] == {"theta": 10000.0, "scaling": None}
    assert info["mask_token"] == {"id": 3, "token": None} and info["vocabulary"] == {"target": 265, "from_draft": 265}
    weights = load_file(folder / "model.safetensors")
    assert (
        found.about["parameters"] == sum(weight.numel() for weight in weights.values()) == found.about["weights"]["F32"]
    )
    assert found.about["bytes"] == (folder / "model.safetensors").stat().st_size
    assert found.about["key_value_bytes_per_token"]["bfloat16"] == 2 * 2 * 2 * 2 * 8  # layers, both, bytes, heads, size
    assert found.starts["blockdraft"].line == f"blockdraft serve --target TARGET --drafter {folder}"
    assert not found.fits and json.loads(json.dumps(found.as_dict()))["what"] == "drafter"


def test_commands(variant: Variant, tiny_target_dir: Path) -> None:
    folder, target = variant(), str(tiny_target_dir)
    lines = inspect(folder, target).starts
    assert lines["blockdraft"].line == f"blockdraft serve --target {target} --drafter {folder}"
    words = shlex.split(str(lines["vLLM"].line))
    assert words[:4] == ["vllm", "serve", target, "--speculative-config"]
    assert json.loads(words[4]) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}
    sglang = f"--model-path {target} --speculative-algorithm DFLASH --speculative-draft-model-path {folder}"
    assert f"{sglang} --speculative-num-draft-tokens 8" in str(lines["SGLang"].line)
    assert lines["llama.cpp"].line is None
    assert f"blockdraft export {folder} --target {target} --format gguf" in str(lines["llama.cpp"].remedy)
    mixed = variant("mixed", layers=(LayerAttention(True, 16), LayerAttention(False, None)))
    refused = inspect(mixed, target).starts["llama.cpp"]
    assert refused.line is refused.remedy is None and "must be the same for all in llama.cpp" in str(refused.reason)


def test_the_other_kinds(tiny_dflash2_dir: Path, tiny_dspark_dir: Path, tiny_target_dir: Path) -> None:
    second, spark = (inspect(path, tiny_target_dir) for path in (tiny_dflash2_dir, tiny_dspark_dir))
    assert second.conventions["draft_tokens"] == 7 and second.conventions["DFlash2DraftModel"]["selector_top_k"] == 5
    assert second.starts["SGLang"].line is None
    assert spark.conventions["draft_tokens"] == 8  # the anchor's position drafts too
    assert spark.conventions["DSparkDraftModel"]["markov_rank"] == 4
    assert spark.starts["vLLM"].line is None and "--format speculators" in str(spark.starts["vLLM"].remedy)


def test_a_target_that_fits_and_others(variant: Variant, tiny_target_dir: Path, tmp_path: Path) -> None:
    own = load_target(tiny_target_dir, device="cpu").source_fingerprint
    found = inspect(variant("own", own), tiny_target_dir)
    assert verdicts(found) == {
        "hidden size": True,
        "vocabulary": True,
        "layers": True,
        "target_layers": True,
        "context": True,
        "tokenizer": None,
        "mask token": True,
        "fingerprint": True,
    }
    assert found.conventions["mask_token"]["token"] == "<|mask|>"
    for name, differences, wrong in (
        ("deep", {"num_target_layers": 5, "target_layers": (0, 4)}, {"layers", "target_layers"}),
        ("masked", {"mask_token_id": 2}, {"mask token"}),
        ("short", {"max_position_embeddings": 64}, {"context"}),
        ("other", {"trained_for": "0123456789abcdef"}, {"fingerprint"}),
    ):
        report = inspect(variant(name, **{"trained_for": own, **differences}), tiny_target_dir)
        assert {check for check, holds in verdicts(report).items() if holds is False} == wrong, name


def test_speculators(variant: Variant, tiny_target_dir: Path, tmp_path: Path) -> None:
    """The number of target layers is the target's own; a reduced vocabulary is reported."""
    config, tensors = zlab.read_checkpoint(variant())
    embedding, head = embedding_and_head(load_target(tiny_target_dir))
    kept = torch.arange(0, 265, 5)
    own = Borrowed(embedding.detach(), head.detach()[kept], kept)
    target = DrafterTarget("owner/model", ("Qwen3ForCausalLM",))
    speculators.LAYOUT.write(tmp_path / "s", Checkpoint(config, tensors, own), target)
    found = inspect(tmp_path / "s")
    assert found.layout == "speculators" and found.wants["name"] == "owner/model" and found.wants["layers"] is None
    assert found.conventions["vocabulary"] == {"target": 265, "from_draft": 53}
    assert found.starts["vLLM"].line == f"vllm serve {tmp_path / 's'}"
    assert found.starts["blockdraft"].line == f"blockdraft serve --target owner/model --drafter {tmp_path / 's'}"
    assert found.starts["SGLang"].remedy is not None
    given = inspect(tmp_path / "s", tiny_target_dir)
    assert given.wants["layers"] == 3 and verdicts(given)["layers"] is True


def test_gguf(variant: Variant, tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = variant(layers=(LayerAttention(False, 16),) * 2)
    done = export_gguf(folder, tmp_path / "gguf", tiny_target_dir, "q8_0")
    drafter, target = inspect(done.drafter, done.target), inspect(done.target)
    plain = inspect(folder, tiny_target_dir)
    assert (drafter.what, drafter.layout, target.what, target.layout) == ("drafter", "gguf", "target", "gguf")
    assert drafter.conventions == plain.conventions
    assert verdicts(drafter)["tokenizer"] is True and False not in verdicts(drafter).values()
    assert drafter.starts["llama.cpp"].line == done.line
    assert drafter.starts["vLLM"].remedy is not None
    assert set(target.about["weights"]) == {"Q8_0", "F32"}
    fingerprint = load_target(done.target, device="cpu", compile="off").source_fingerprint
    assert target.about["fingerprint"] == fingerprint is not None
    assert target.about["parameters"] == inspect(tiny_target_dir).about["parameters"]


def test_eagle3_as_gguf(eagle3_of_three_target_layers: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    plain = inspect(eagle3_of_three_target_layers)
    assert "--format gguf" in str(plain.starts["llama.cpp"].remedy)
    done = export_gguf(eagle3_of_three_target_layers, tmp_path, tiny_target_dir, "bf16")
    assert done.line.endswith("--spec-type draft-eagle3 --spec-draft-n-max 5")
    found = inspect(done.drafter, done.target)
    assert (found.what, found.layout, found.about["architecture"]) == ("drafter", "gguf", "LlamaForCausalLMEagle3")
    assert found.conventions == plain.conventions and found.conventions["target_layers"]["llama_cpp"] == [1, 2, 2]
    assert found.about["parameters"] == plain.about["parameters"]
    assert verdicts(found)["tokenizer"] is True and False not in verdicts(found).values()
    assert found.starts["llama.cpp"].line == done.line
    assert "--format eagle3" in str(found.starts["SGLang"].remedy)


def test_a_target(tiny_target_dir: Path) -> None:
    found = inspect(tiny_target_dir)
    assert (found.what, found.layout, found.about["architecture"]) == ("target", "transformers", "Qwen3ForCausalLM")
    weights = load_file(tiny_target_dir / "model.safetensors")
    assert found.about["parameters"] == sum(weight.numel() for weight in weights.values())
    assert found.about["fingerprint"] == load_target(tiny_target_dir, device="cpu").source_fingerprint
    assert found.about["runs"] == "native" and found.about["quantized"] is None and found.about["chat_template"]
    assert found.starts["vLLM"].line == f"vllm serve {tiny_target_dir}"


def test_a_quantized_target(tiny_target_dir: Path, tmp_path: Path) -> None:
    from blockdraft_tools.quantize.run import quantize
    from blockdraft_tools.quantize.settings import QuantizeSettings

    quantize(tiny_target_dir, tmp_path / "q", QuantizeSettings(bits=4))
    found = inspect(tmp_path / "q")
    assert found.what == "target" and found.about["quantized"]["quant_method"] == "compressed-tensors"
    assert found.about["fingerprint"] == inspect(tiny_target_dir).about["fingerprint"]
    assert found.about["bytes"] < inspect(tiny_target_dir).about["bytes"]


def test_an_adapter(tmp_path: Path) -> None:
    raw = {"peft_type": "LORA", "base_model_name_or_path": "owner/model", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, "target_modules": ["v_proj", "q_proj"]}))
    save_file({"a": torch.zeros(4, 8), "b": torch.zeros(8, 4)}, tmp_path / "adapter_model.safetensors")
    found = inspect(tmp_path)
    assert (found.what, found.layout, found.wants) == ("adapter", "peft", {"name": "owner/model"})
    assert found.about["parameters"] == 64 and found.about["modules"] == ["q_proj", "v_proj"]
    line = f"blockdraft chat --target owner/model --adapter {tmp_path} --drafter none"
    assert found.starts["blockdraft"].line == line
    (tmp_path / "adapter_config.json").write_text(json.dumps({**raw, "target_modules": "all-linear"}))
    assert inspect(tmp_path).about["modules"] == ["all-linear"]


def test_the_bundled_drafter() -> None:
    found = inspect("bundled")
    assert found.about["architecture"] == "DFlashDraftModel" and verdicts(found)["fingerprint"] is True
    assert inspect(TINY_DRAFTER, "bundled").fits == found.fits


def test_a_target_of_the_catalogue_has_its_own_drafter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target_dir: Path
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    place = models_folder() / "smollm2"
    shutil.copytree(BUNDLED, place)
    own = bundled_drafter(known("smollm2"))
    assert inspect("bundled", "smollm2").path == str(own)
    assert inspect("smollm2").starts["blockdraft"].line == f"blockdraft chat --target {place}"
    assert inspect(tiny_target_dir).starts["blockdraft"].line == f"blockdraft chat --target {tiny_target_dir}"
    assert inspect("bundled").path == inspect("bundled", "bundled").path == str(TINY_DRAFTER)


def test_wrong_places(variant: Variant, tiny_target_dir: Path, tmp_path: Path) -> None:
    empty, run, bare = (tmp_path / name for name in ("empty", "run", "bare"))
    for folder in (empty, run, bare):
        folder.mkdir()
    variant("run/step")
    bare.joinpath("config.json").write_text((variant("whole") / "config.json").read_text())
    broken = variant("broken")
    raw = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**raw, "rope_theta": 5.0}))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "note.txt").touch()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "adapter_config.json").write_text("[]")
    for place, message in (
        (empty, "holds no checkpoint: there is no config.json and no adapter_config.json"),
        (run, f"did you mean {run / 'step'}"),
        (bare, r"bare/config.json: \*.safetensors must be beside it, but is absent; copy"),
        (broken, "broken/config.json: rope_theta is 5.0 but rope_parameters.rope_theta is 10000.0"),
        (tmp_path / "cut.gguf", "is corrupt or cut short"),
        (tmp_path / "note.txt", "is neither a folder nor a GGUF file"),
        (tmp_path / "list", "does not describe an adapter"),
        (tmp_path / "nowhere" / "at" / "all", "There is no folder"),
    ):
        with pytest.raises(UsageError, match=message):
            inspect(place)
    (empty / "a.gguf").touch()
    with pytest.raises(UsageError, match="give one of its files, such as .*a.gguf"):
        inspect(empty)
    with pytest.raises(UsageError, match="is a target itself; leave --target out"):
        inspect(tiny_target_dir, tiny_target_dir)


def test_weights_that_are_cut_short(tiny_target_dir: Path, tiny_medusa_dir: Path, tmp_path: Path) -> None:
    new_model(tiny_target_dir, tmp_path / "denoiser", NewSettings(layers=1, hidden_size=32, heads=2))
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    shutil.copytree(tiny_medusa_dir, tmp_path / "medusa")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    shutil.copy(tiny_target_dir / "model.safetensors", tmp_path / "adapter" / "adapter_model.safetensors")
    for name in ("denoiser", "target", "medusa", "adapter"):
        for file in [*(tmp_path / name).glob("*.safetensors"), *(tmp_path / name).glob("*.pt")]:
            for length in (file.stat().st_size // 2, 4, 0):
                with file.open("r+b") as opened:
                    opened.truncate(length)
                with pytest.raises(UsageError, match=name):
                    inspect(tmp_path / name)


RUINS: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("tiny_drafter_dir", ("num_hidden_layers",), 10**12, "num_hidden_layers must be at most 1024.*, got 1000000000000"),
    ("tiny_drafter_dir", ("intermediate_size",), 10**40, "must be at most"),
    ("tiny_drafter_dir", ("rms_norm_eps",), 10**400, "must be a positive number up to 1e\\+30"),
    ("tiny_drafter_dir", ("rope_parameters", "rope_type"), [], "rope_scaling must be a JSON object"),
    ("tiny_medusa_dir", ("medusa_num_layers",), 10**12, "medusa_num_layers must be at most 1024.*, got 1000000000000"),
    ("tiny_medusa_dir", ("hidden_size",), 10**12, "hidden_size must be at most.*, got 1000000000000"),
    ("tiny_mtp_dir", ("rope_scaling",), -1, "rope_scaling must be .*got -1"),
    ("speculators_dir", ("speculators_model_type",), [], "speculators_model_type must be"),
    ("speculators_dir", ("speculators_config",), -1, "speculators_config must be a JSON object.*, got -1"),
    ("speculators_dir", ("speculators_config", "proposal_methods"), {"a": 1}, "proposal_methods must be"),
    ("speculators_dir", ("speculators_config", "proposal_methods"), [[]], "proposal_methods must be"),
    ("speculators_dir", ("speculators_config", "verifier"), 5, "verifier must be .*got 5"),
    (
        "speculators_dir",
        ("transformer_layer_config", "num_hidden_layers"),
        10**12,
        "hidden_layers must be .*got 10000",
    ),
    ("speculators_dir", ("transformer_layer_config", "model_type"), "x", "of the type 'x' cannot be read: .{1,200}$"),
]


@pytest.fixture
def speculators_dir(tiny_eagle3_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> Path:
    return written_so(tiny_eagle3_dir, "eagle3_speculators", tiny_target_dir, tmp_path / "speculators")


@pytest.mark.parametrize(("drafter", "place", "value", "message"), RUINS)
def test_values_that_are_none(
    drafter: str, place: tuple[str, ...], value: Any, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """They are refused by name, before anything is made as large as they say."""
    folder = tmp_path / "ruined"
    shutil.copytree(request.getfixturevalue(drafter), folder)
    raw = json.loads((folder / "config.json").read_text())
    *outer, last = place
    inner = raw
    for key in outer:
        inner = inner[key]
    inner[last] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=message):
        inspect(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\xff", "{", "[]", "5"])
def test_configurations_that_are_none(text: str, tiny_drafter_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_drafter_dir, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(text, encoding="latin1")
    target = load_target(tiny_target_dir, device="cpu")
    for read in (inspect, partial(load_drafter, target=target)):
        with pytest.raises(UsageError, match="odd"):
            read(tmp_path / "odd")


def test_targets_with_values_that_are_none(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Impossible values are reported, without an error of torch."""
    shutil.copytree(tiny_target_dir, tmp_path / "odd")
    raw = json.loads((tmp_path / "odd" / "config.json").read_text())
    for changed in (
        {"architectures": -1},
        {"architectures": [[]]},
        {"head_dim": -1},
        {"rope_parameters": {"rope_theta": "x"}},
    ):
        (tmp_path / "odd" / "config.json").write_text(json.dumps({**raw, **changed}))
        found = inspect(tmp_path / "odd")
        assert found.what == "target" and found.about["architecture"] in ("qwen3", "Qwen3ForCausalLM")


def test_commands_with_odd_paths(tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "place" [/b] $HOME'
    done = export_gguf(tiny_drafter_dir, odd, tiny_target_dir, "bf16")
    assert shlex.split(str(inspect(done.target).starts["llama.cpp"].line)) == ["llama-server", "-m", str(done.target)]
    folder = str(shutil.copytree(tiny_drafter_dir, odd / "drafter"))
    starts = inspect(folder, tiny_target_dir).starts
    assert shlex.split(str(starts["blockdraft"].line))[-1] == folder
    assert folder in shlex.split(str(starts["SGLang"].line)) and folder in shlex.split(str(starts["llama.cpp"].remedy))
    assert json.loads(shlex.split(str(starts["vLLM"].line))[-1])["model"] == folder


def test_targets_that_are_none(tiny_drafter_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for place, kind in ((tiny_drafter_dir, "a drafter"), (tmp_path, "an adapter")):
        with pytest.raises(UsageError, match=f"target is {place}, which is {kind}; give a causal"):
            inspect(tiny_drafter_dir, place)


def test_a_block_diffusion_model(tiny_drafter_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "denoiser"
    new_model(tiny_target_dir, place, NewSettings(layers=1, hidden_size=32, heads=2))
    found = inspect(place)
    weights = load_file(place / "model.safetensors")
    assert (found.what, found.about["block_size"]) == ("block-diffusion model", 8)
    assert found.about["parameters"] == sum(weight.numel() for weight in weights.values())
    assert found.starts["blockdraft"].line == f"blockdraft diffusion generate --model {place}"
    with pytest.raises(UsageError, match="denoiser is a block-diffusion model, .* leave --target out"):
        inspect(place, tiny_target_dir)
    with pytest.raises(UsageError, match=f"target is {place}, which is a block-diffusion model"):
        inspect(tiny_drafter_dir, place)


def written_so(drafter: Path, name: str, target: Path, out: Path) -> Path:
    loaded = load_target(target, device="cpu")
    convert(drafter, out, format_for(name, loaded, str(target), "owner/model"), loaded)
    return out


def test_eagle3(tiny_eagle3_dir: Path, tiny_target_dir: Path, tmp_path: Path) -> None:
    found = inspect(tiny_eagle3_dir)
    assert (found.layout, found.about["architecture"]) == ("eagle3", "LlamaForCausalLMEagle3")
    info, weights = found.conventions, load_file(tiny_eagle3_dir / "model.safetensors")
    assert (info["block_size"], info["draft_tokens"]) == (6, 5) and info["vocabulary"] == {
        "target": 265,
        "from_draft": 120,
    }
    assert info["target_layers"]["eagle3"] == [0, 1] and info["target_layers"]["eagle3_speculators"] == [1, 2]
    assert info["LlamaForCausalLMEagle3"]["qk_norm"] is False and "mask_token" not in info
    assert found.about["parameters"] == sum(w.numel() for w in weights.values() if w.is_floating_point())
    assert found.wants["layers"] is None and found.about["context"] == 256
    words = shlex.split(str(found.starts["vLLM"].line))
    assert json.loads(words[-1]) == {"method": "eagle3", "model": str(tiny_eagle3_dir), "num_speculative_tokens": 5}
    assert "--speculative-algorithm EAGLE3 " in str(found.starts["SGLang"].line)
    assert "--speculative-num-steps 5 " in str(found.starts["SGLang"].line)
    assert str(found.starts["SGLang"].line).endswith("--speculative-num-draft-tokens 6")
    assert "the number of target layers must be 3 in llama.cpp, got 2" in str(found.starts["llama.cpp"].reason)
    beside = inspect(tiny_eagle3_dir, tiny_target_dir)
    assert (
        verdicts(beside)["layers"] is verdicts(beside)["target_layers"] is True
        and False not in verdicts(beside).values()
    )

    other = inspect(written_so(tiny_eagle3_dir, "eagle3_speculators", tiny_target_dir, tmp_path / "s"))
    assert other.layout == "eagle3_speculators" and other.wants["name"] == "owner/model"
    assert other.conventions["target_layers"] == info["target_layers"]
    assert other.starts["vLLM"].line == f"vllm serve {tmp_path / 's'}"
    assert "--format eagle3" in str(other.starts["SGLang"].remedy)


def test_target_layers_that_only_the_target_tells(tiny_eagle3_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_eagle3_dir, tmp_path / "usual")
    file = tmp_path / "usual" / "config.json"
    raw = json.loads(file.read_text())
    del raw["eagle_config"], raw["eagle_aux_hidden_state_layer_ids"]
    file.write_text(json.dumps(raw))
    with pytest.raises(
        UsageError, match="eagle_aux_hidden_state_layer_ids must be given.*, but is absent; or name the target"
    ):
        inspect(tmp_path / "usual")


def test_medusa_and_mtp(tiny_medusa_dir: Path, tiny_mtp_dir: Path, tiny_target_dir: Path) -> None:
    heads, mtp = (inspect(path, tiny_target_dir) for path in (tiny_medusa_dir, tiny_mtp_dir))
    assert (heads.layout, heads.about["architecture"], heads.conventions["draft_tokens"]) == (
        "medusa",
        "MedusaModel",
        3,
    )
    assert (mtp.layout, mtp.about["architecture"], mtp.conventions["draft_tokens"]) == ("mtp", "MTPDraftModel", 3)
    file = tiny_medusa_dir / "medusa_lm_head.pt"
    assert heads.about["bytes"] == file.stat().st_size and heads.about["weights"] == {"F32": heads.about["parameters"]}
    assert heads.conventions["MedusaModel"] == {"shared_head": False} and heads.about["layers"] == 2
    assert mtp.conventions["MTPDraftModel"] == {"normed_feedback": True} and mtp.conventions["rope"]["theta"] == 10000
    for report in (heads, mtp):
        assert report.conventions["target_layers"] == HEAD_INPUT
        assert False not in verdicts(report).values() and report.wants["layers"] == 3
        assert [engine for engine, start in report.starts.items() if start.line] == ["blockdraft"]
        assert json.loads(json.dumps(report.as_dict()))["what"] == "drafter"


def test_configuration_of_every_layout(
    tiny_drafter_dir: Path,
    tiny_dspark_dir: Path,
    tiny_eagle3_dir: Path,
    tiny_medusa_dir: Path,
    tiny_mtp_dir: Path,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """Each of them is inspected as it is read, whatever is in it."""
    folders = [tiny_drafter_dir, tiny_dspark_dir, tiny_eagle3_dir, tiny_medusa_dir, tiny_mtp_dir]
    folders.append(written_so(tiny_mtp_dir, "mtp_speculators", tiny_target_dir, tmp_path / "mtp"))
    folders.append(written_so(tiny_drafter_dir, "speculators", tiny_target_dir, tmp_path / "speculators"))
    folders.append(written_so(tiny_eagle3_dir, "eagle3_speculators", tiny_target_dir, tmp_path / "eagle3"))
    found = [inspect(folder, tiny_target_dir) for folder in folders]
    tokenizer = load_target(tiny_target_dir, device="cpu").tokenizer
    vocabulary = None if tokenizer is None else tokenizer.get_vocab()
    assert {report.layout for report in found} == {*layouts()}
    for folder, report in zip(folders, found, strict=True):
        assert report.config == read_drafter(folder, vocabulary, 3).config
