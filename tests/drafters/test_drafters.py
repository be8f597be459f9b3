import copy
import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.decode.proposal import ChainPlan
from blockdraft.drafters import (
    TINY_DRAFTER,
    as_given,
    bundled_for,
    check_place,
    drafter_files,
    drafter_of,
    entries,
    load,
    load_drafter,
)
from blockdraft.drafters.dflash.drafter import DFlashDrafter
from blockdraft.drafters.dflash.network import DFlashNetwork
from blockdraft.drafters.lookup import LookupDrafter
from blockdraft.drafters.none import NoDrafter
from blockdraft.engine.adaptive import costs as stored_costs
from blockdraft.errors import UsageError
from blockdraft.formats.zlab import read_checkpoint, write_checkpoint
from blockdraft.models import bundled_drafter
from blockdraft.models.catalogue import known
from blockdraft.models.places import folder_place
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import BUNDLED, Target, load_target
from blockdraft.types import SamplingParams
from blockdraft_tools.quantize.run import quantize
from blockdraft_tools.quantize.settings import QuantizeSettings

KINDS = {
    "bidirectional": (LayerAttention(False, None),) * 2,
    "causal": (LayerAttention(True, None),) * 2,
    "window": (LayerAttention(False, 4), LayerAttention(False, 4)),
    "mixed": (LayerAttention(True, 4), LayerAttention(False, None)),
}


def test_none_proposes_the_anchor_alone(target: Target) -> None:
    drafter = load_drafter("none", target=target)
    assert isinstance(drafter, NoDrafter)
    assert drafter.propose(
        drafter.new_state(2, 9), torch.tensor([4, 5]), ChainPlan(1, [SamplingParams()] * 2)
    ).tokens.tolist() == [[4], [5]]


def test_deep_copies_share_weights_and_what_is_compiled_is_not_pickled(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    assert copy.deepcopy([target, drafter]) == [target, drafter]
    for each in (target, drafter):
        with pytest.raises(UsageError, match="cannot be pickled; load it anew"):
            pickle.dumps(each)


def make(kind: str, target: Target, folder: Path) -> DFlashDrafter:
    config = dataclasses.replace(read_checkpoint(folder)[0], layers=KINDS[kind])
    torch.manual_seed(3)
    return DFlashDrafter(DFlashNetwork(config), target)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_different_lengths_draft_as_if_alone(kind: str, target: Target, tiny_drafter_dir: Path) -> None:
    drafter = make(kind, target, tiny_drafter_dir)
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(2, 9, 64, generator=generator)
    tokens, lengths, anchor = torch.zeros(2, 9, dtype=torch.long), [9, 5], torch.tensor([7, 8])
    block = torch.full((2, 8), drafter.config.mask_token_id)
    block[:, 0] = anchor
    state = drafter.new_state(2, 40)
    drafter.observe(state, tokens, hidden_states, lengths)
    together = drafter.draft_logits(state, block)
    for row in range(2):
        alone = drafter.new_state(1, 40)
        for start in (0, 3):  # observing in parts is the same
            end = lengths[row] if start else 3
            drafter.observe(alone, tokens[:1, start:end], hidden_states[row : row + 1, start:end], [end - start])
        expected = drafter.draft_logits(alone, block[row : row + 1])[0]
        torch.testing.assert_close(together[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_leaves_no_trace_and_depends_on_what_is_visible(
    kind: str, target: Target, tiny_drafter_dir: Path
) -> None:
    drafter = make(kind, target, tiny_drafter_dir)
    hidden_states = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1))
    state = drafter.new_state(1, 40)
    drafter.observe(state, torch.zeros(1, 12, dtype=torch.long), hidden_states, [12])
    block = torch.tensor([[7, 11, 12, 13]])
    first = drafter.draft_logits(state, block)
    drafter.propose(state, torch.tensor([99]), ChainPlan(8, [SamplingParams()]))
    torch.testing.assert_close(drafter.draft_logits(state, block), first)
    changed = drafter.draft_logits(state, torch.tensor([[7, 11, 12, 50]]))
    earlier_slots_see_later_ones = not torch.allclose(changed[:, 1], first[:, 1])
    assert earlier_slots_see_later_ones == any(not layer.causal for layer in KINDS[kind])


def test_weights_are_borrowed_not_copied(target: Target, tiny_drafter_dir: Path) -> None:
    drafter = load_drafter(tiny_drafter_dir, target=target)
    assert isinstance(drafter, DFlashDrafter)
    assert not any("embed" in name or "lm_head" in name for name, _ in drafter.network.named_parameters())


def test_the_drafter_that_is_bundled_for_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    folder_place(model := known("smollm2")).mkdir(parents=True)
    for target in ("smollm2", folder_place(model)):
        assert drafter_files("bundled", target) == bundled_drafter(model)
    assert drafter_files("bundled", None) == drafter_files("bundled", "bundled") == TINY_DRAFTER
    with pytest.raises(UsageError, match="No drafter is bundled for owner/name"):
        drafter_files("bundled", "owner/name")
    with pytest.raises(UsageError, match="lookup has no files"):
        drafter_files("lookup", None)


def test_a_target_without_a_bundled_drafter_gets_lookup(target: Target) -> None:
    assert isinstance(load_drafter(target=target), LookupDrafter)
    with pytest.raises(UsageError, match="hidden_size must be"):
        load_drafter("bundled", target=target)


def test_a_target_is_known_by_its_weights(
    tmp_path: Path, tiny_target_dir: Path, tiny_eagle3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it lies, and however it was rounded."""
    folder, few = tmp_path / "drafter", tmp_path / "few"
    shutil.copytree(tiny_eagle3_dir, folder)
    raw = json.loads((folder / "config.json").read_text())
    trained_for = load_target(tiny_target_dir, device="cpu").source_fingerprint
    (folder / "config.json").write_text(json.dumps(raw | {"target_fingerprint": trained_for}))
    monkeypatch.setattr(load, "bundled_drafter", lambda model: folder if model.id == "smollm2" else None)
    quantize(tiny_target_dir, few, QuantizeSettings(8, 8))
    for place in (tiny_target_dir, few):
        assert bundled_for(place) == drafter_files("bundled", place) == folder
        loaded = load_target(place, device="cpu")
        assert load_drafter(target=loaded).path == load_drafter("bundled", target=loaded).path == folder
    assert bundled_for(BUNDLED) == TINY_DRAFTER
    for other in (folder, tmp_path, "owner/name"):
        assert bundled_for(other) is None


def test_a_folder_with_the_name_of_a_drafter() -> None:
    assert [as_given(path) for path in ("mtp", Path("bundled"), "own/mtp", "mine")] == [
        "./mtp", "./bundled", "own/mtp", "mine"]  # fmt: skip


def test_unknown_drafters_are_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ValueError, match="nowhere is no drafter; .* bundled, .*lookup"):
        load_drafter("nowhere", target=target)
    with pytest.raises(ValueError, match="owner/a-drafter is no folder here, and the hub does not send a drafter"):
        load_drafter("owner/a-drafter", target=target)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["HydraModel"]}))
    with pytest.raises(ValueError, match=r"HydraModel.*dflash \(DFlashDraftModel.*draft_lm \(.* more\)"):
        load_drafter(tmp_path, target=target)
    config.write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        load_drafter(tmp_path, target=target)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 64, "hidden_size must be .*32, got 64"),
        ("num_target_layers", 4, "num_target_layers must be .*3, got 4"),
        ("vocab_size", 300, "vocab_size must be .*265, got 300"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    field: str, value: int, message: str, tmp_path: Path, target: Target, tiny_drafter_dir: Path
) -> None:
    config = dataclasses.replace(read_checkpoint(tiny_drafter_dir)[0], **{field: value})  # type: ignore[arg-type]
    write_checkpoint(tmp_path / "other", config, DFlashNetwork(config).state_dict())
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "other", target=target)


def test_a_truncated_drafter_is_refused(tmp_path: Path, target: Target, tiny_drafter_dir: Path) -> None:
    for file in tiny_drafter_dir.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_drafter(tmp_path, target=target)


def test_no_architecture_has_two_drafters() -> None:
    claimed = [name for entry in entries().values() for name in entry.architectures]
    assert len(claimed) == len({*claimed})


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_dflash2_dir", "tiny_dspark_dir", "tiny_flow_dir"])
def test_a_network_finds_its_drafter(name: str, target: Target, request: pytest.FixtureRequest) -> None:
    loaded: Any = load_drafter(request.getfixturevalue(name), target=target)

    class Extended(type(loaded.network)):  # type: ignore[misc]
        """A subclass, as `compat` has."""

    actual = drafter_of(Extended(loaded.config), target)
    assert type(actual) is type(loaded) and actual.block_size == loaded.block_size


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_eagle3_dir", "tiny_mtp_dir"])
def test_a_network_knows_how_it_was_trained(
    name: str, target: Target, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(request.getfixturevalue(name), folder)
    drafter: Any = load_drafter(folder, target=target)
    assert drafter.network.qat_bits is None
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"qat_bits": 4}))
    drafter = load_drafter(folder, target=target)
    assert drafter.network.qat_bits == 4


@pytest.mark.parametrize("name", ["tiny_drafter_dir", "tiny_eagle3_dir", "tiny_mtp_dir"])
def test_a_drafter_knows_its_bits(
    name: str, target: Target, tiny_target_dir: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(request.getfixturevalue(name), folder)
    rounded = load_target(tiny_target_dir, device="cpu", quantize="int8", compile="on")
    kept = load_target(tiny_target_dir, device="cpu", quantize="int8", compile="on", round_drafters=False)
    assert [load_drafter(folder, target=each).bits for each in (target, kept, rounded)] == [None, None, 8]
    before = load_drafter(folder, target=rounded)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"qat_bits": 4}))
    after = load_drafter(folder, target=rounded)
    both = load_drafter(f"lookup+{folder}", target=rounded)
    assert after.bits == 4 and [part.bits for part in both.parts] == [None, 4]
    pairs = (rounded, before), (rounded, after), (kept, load_drafter(folder, target=kept)), (rounded, both)
    assert len({stored_costs.path(*pair) for pair in pairs}) == 4  # what steps cost is another thing


def test_uncompiled_drafters_are_not_quantized(target: Target, request: pytest.FixtureRequest) -> None:
    uncompiled = load_target(target.path, dtype="float32", device="cpu", compile="off")
    for name in ("tiny_drafter_dir", "tiny_eagle3_dir", "tiny_mtp_dir", "tiny_medusa_dir"):
        assert load_drafter(request.getfixturevalue(name), target=uncompiled).bits is None


def test_combinations_have_costs_of_their_own(
    target: Target, tiny_drafter_dir: Path, tiny_eagle3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(*names: object) -> Path:
        return stored_costs.path(target, load_drafter("+".join(map(str, names)), target=target))

    together = [
        (tiny_drafter_dir, tiny_eagle3_dir),
        (tiny_drafter_dir, "lookup"),
        (tiny_drafter_dir, target.path),
    ]
    assert len({file(*each) for each in together}) == 3
    actual = file(tiny_drafter_dir)
    monkeypatch.chdir(tiny_drafter_dir.parent)
    assert file(tiny_drafter_dir.name) == actual  # by the place, however it is named
    (other := tiny_drafter_dir.parent / "elsewhere").mkdir()
    shutil.copytree(tiny_drafter_dir, other / tiny_drafter_dir.name)
    monkeypatch.chdir(other)
    assert file(tiny_drafter_dir.name) != actual


def test_other_networks_have_no_drafter(target: Target) -> None:
    with pytest.raises(UsageError, match=r"No drafter runs a Linear; give one of \['DFlash2Network', 'DFlashNetwork'"):
        drafter_of(torch.nn.Linear(2, 2), target)


def test_the_place_of_a_drafter_needs_no_target(
    tiny_drafter_dir: Path, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    for good in ("none", "mtp", "bundled", tiny_drafter_dir, tiny_target_dir, f"lookup+{tiny_drafter_dir}"):
        check_place(good)
    for name in ("pages.gguf", "notes.gguf"):
        (tmp_path / name).write_text("notes")
    for bad, message in (
        (tmp_path, r"is no drafter; .* lookup, mtp, none.* It holds the file \S*notes.gguf, which may be one.$"),
        ("lookup+nowhere", "^nowhere is no drafter"),
        (f"{tmp_path.name}/name", f"^{tmp_path.name}/name is no drafter"),  # a path with a mistake
        ("owner/name", "owner/name is no folder here, and the hub does not send"),
        (tmp_path / "notes.gguf", "is no GGUF file"),
        ("none+none", "names none twice"),
    ):
        with pytest.raises(UsageError, match=message):
            check_place(bad)


def test_a_drafter_of_the_hub(
    target: Target, tiny_drafter_dir: Path, tmp_path: Path, constants: Callable[..., None]
) -> None:
    """The hub's client takes downloaded files where there is no connection."""
    constants("huggingface_hub.constants", HF_HUB_CACHE=str(tmp_path))
    repository = tmp_path / "models--owner--tiny"
    shutil.copytree(tiny_drafter_dir, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    check_place("lookup+owner/tiny")
    loaded = load_drafter("owner/tiny", target=target)
    assert loaded.path is not None and Path(loaded.path).parent == repository / "snapshots"
    assert drafter_files("owner/tiny", None) == loaded.path
