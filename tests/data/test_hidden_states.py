"""Features on disk, checked for target, data and taps."""

import pickle
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from some_hidden_states import LENGTHS, TARGET_LAYERS, alone, made

from blockdraft.data import hidden_states
from blockdraft.data.documents import TokenData
from blockdraft.data.hidden_states import batches, plan_hidden_states, read_hidden_states
from blockdraft.data.settings import HiddenStateSettings
from blockdraft.folders import held
from blockdraft.targets import Target, load_target, target_fingerprint

FLOAT = HiddenStateSettings(dtype="float32", batch_tokens=30)


def test_a_cache_holds_them_in_document_order(
    tmp_path: Path, target: Target, data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "SHARD_BYTES", 20 * 2 * target.hidden_size * 4)
    told: list[tuple[int, int]] = []
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    assert cache.need == sum(LENGTHS) * 2 * target.hidden_size * 4
    cache.write(lambda done, total: told.append((done, total)))
    assert told[-1] == (sum(LENGTHS), sum(LENGTHS)) and len(told) > 4
    found = read_hidden_states(tmp_path / "f")
    assert len(list((tmp_path / "f").glob("hidden-states-*"))) == 4  # [7 1 12] [3] [40] [9 9]
    assert len(found) == len(data) and len(list(found)) == len(data)
    for i in range(-1, len(data)):
        torch.testing.assert_close(found[i], alone(target, data, i), atol=1e-4, rtol=1e-4)
    assert (found.target_layers, found.data, found.target) == (
        TARGET_LAYERS,
        data.fingerprint,
        target_fingerprint(target),
    )
    assert torch.equal(pickle.loads(pickle.dumps(found))[4], found[4]) and len(pickle.dumps(found)) < 1000
    with pytest.raises(IndexError):
        found[len(data)]


def test_an_interrupted_cache_goes_on(
    tmp_path: Path, target: Target, data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "SHARD_BYTES", 20 * 2 * target.hidden_size * 4)

    def stop(done: int, total: int) -> None:
        if done > 40:  # in the third shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write(stop)
    with pytest.raises(
        ValueError, match=r"lacks hidden-states-00002\.safetensors; run the same `blockdraft hidden-states` command"
    ):
        read_hidden_states(tmp_path / "f")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "f").glob("hidden-states-*")}
    assert len(kept) == 2
    monkeypatch.undo()  # the layout stays that of the beginning
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    assert cache.need == 58 * 2 * target.hidden_size * 4
    cache.write()
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "f").glob("hidden-states-*")}.items()
    torch.testing.assert_close(read_hidden_states(tmp_path / "f")[5], alone(target, data, 5), atol=1e-4, rtol=1e-4)


def test_a_full_disk_is_refused_before_it_starts(
    tmp_path: Path, target: Target, data: TokenData, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    need = sum(LENGTHS) * 2 * target.hidden_size * 2
    monkeypatch.setattr(hidden_states.shutil, "disk_usage", lambda path: usage(0, 0, need - 1))
    with pytest.raises(ValueError, match=r"need 0\.0 MiB and .* has 0\.0 MiB free; choose fewer target layers"):
        plan_hidden_states(tmp_path / "new/f", target, data, TARGET_LAYERS, HiddenStateSettings()).write()
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(hidden_states.shutil, "disk_usage", lambda path: usage(0, 0, need))
    plan_hidden_states(tmp_path / "new/f", target, data, TARGET_LAYERS, HiddenStateSettings()).write()


def test_anothers_cache_is_refused(tmp_path: Path, target: Target, data: TokenData) -> None:
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    found = read_hidden_states(tmp_path / "f")
    found.check(target, data, TARGET_LAYERS)
    others = made(tmp_path / "others", target, seed=1)
    for arguments, message in [
        (
            (target, data, (0, 1)),
            r"target_layers \(2, 0\) instead of \[0, 1\]|target_layers \[2, 0\] instead of \[0, 1\]",
        ),
        ((target, others, TARGET_LAYERS), "other hidden states: data "),
    ]:
        with pytest.raises(ValueError, match=message + ".*or run `blockdraft hidden-states` with another folder"):
            found.check(*arguments)
        with pytest.raises(ValueError, match=message):
            plan_hidden_states(tmp_path / "f", *arguments, FLOAT)
    with pytest.raises(ValueError, match="dtype float32 instead of bfloat16"):
        plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, HiddenStateSettings())
    shutil.copytree(target.path, tmp_path / "target")  # type: ignore[arg-type]
    weights = load_file(tmp_path / "target/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.1
    save_file(weights, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="other hidden states: target "):
        found.check(load_target(tmp_path / "target", device="cpu"), data, TARGET_LAYERS)


def test_some_of_the_stored_taps_are_read(tmp_path: Path, target: Target, data: TokenData) -> None:
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    found, (last, first) = read_hidden_states(tmp_path / "f"), alone(target, data, 1).chunk(2, dim=-1)
    for target_layers, expected in [
        ((0,), [first]),
        ((2,), [last]),
        ((0, 2), [first, last]),
        (TARGET_LAYERS, [last, first]),
    ]:
        found.check(target, data, target_layers)
        torch.testing.assert_close(found.of(1, target_layers), torch.cat(expected, dim=-1), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"other hidden states: target_layers \(2, 0\) instead of \[0, 1\]"):
        found.check(target, data, (0, 1))


@pytest.mark.slow
def test_the_fingerprint_of_a_target_is_not_of_its_dtype(target: Target) -> None:
    half = load_target(target.path, dtype="bfloat16", device="cpu")
    assert target_fingerprint(half) == target_fingerprint(target)


def test_broken_caches_are_refused(tmp_path: Path, target: Target, data: TokenData) -> None:
    with pytest.raises(ValueError, match=r"hidden_states\.json does not exist"):
        read_hidden_states(tmp_path)
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    save_file({"hidden_states": torch.zeros(3, 64)}, tmp_path / "f/hidden-states-00000.safetensors")
    with pytest.raises(ValueError, match="is broken .it holds 3 tokens instead of 81.; delete it"):
        read_hidden_states(tmp_path / "f")
    with pytest.raises(ValueError, match="holds other files"):
        plan_hidden_states(tmp_path / "data", target, data, TARGET_LAYERS, FLOAT)


def test_one_process_at_a_time_computes_features(tmp_path: Path, target: Target, data: TokenData) -> None:
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    with held(tmp_path / "f", "computing features"), pytest.raises(ValueError, match="in use by process"):
        cache.write()
    assert not (tmp_path / "f").exists()


def test_what_another_process_has_written_since_the_plan_stays(tmp_path: Path, target: Target, data: TokenData) -> None:
    plans = [
        plan_hidden_states(tmp_path / "f", target, data, target_layers, FLOAT)
        for target_layers in (TARGET_LAYERS, (0, 2))
    ]
    same = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    plans[0].write()
    with pytest.raises(ValueError, match=r"holds other hidden states: target_layers \[2, 0\] instead of \[0, 2\]"):
        plans[1].write()
    told: list[int] = []
    same.write(lambda done, total: told.append(total))
    assert told == []
    read_hidden_states(tmp_path / "f").check(target, data, TARGET_LAYERS)


def test_batches_hold_like_lengths() -> None:
    assert list(batches([5, 1, 4, 9, 1], 10)) == [[3], [0, 2], [1, 4]]
    assert sorted(i for group in batches([50] * 3, 10) for i in group) == [0, 1, 2]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be 'bfloat16', 'float16' or 'float32', got 'int8'"):
        HiddenStateSettings(dtype="int8")
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        HiddenStateSettings(batch_tokens=0)
