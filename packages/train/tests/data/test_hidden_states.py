"""Hidden states on disk, checked against target, data and target layers."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from some_hidden_states import LENGTHS, TARGET_LAYERS, alone, made

from blockdraft.folders import held
from blockdraft.targets import Target, load_target, target_fingerprint
from blockdraft_train.data import hidden_states
from blockdraft_train.data.documents import TokenData
from blockdraft_train.data.hidden_states import batches, plan_hidden_states, read_hidden_states
from blockdraft_train.data.settings import HiddenStateSettings

FLOAT = HiddenStateSettings(dtype="float32", batch_tokens=30)


def test_cache_is_in_document_order(
    tmp_path: Path, target: Target, data: TokenData, constants: Callable[..., None]
) -> None:
    constants(hidden_states, SHARD_BYTES=20 * 2 * target.hidden_size * 4)
    progress: list[tuple[int, int]] = []
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    assert cache.need == sum(LENGTHS) * 2 * target.hidden_size * 4
    cache.write(lambda done, total: progress.append((done, total)))
    assert progress[-1] == (sum(LENGTHS), sum(LENGTHS)) and len(progress) > 4
    cached = read_hidden_states(tmp_path / "f")
    assert len(list((tmp_path / "f").glob("hidden-states-*"))) == 4  # [7 1 12] [3] [40] [9 9]
    assert len(cached) == len(data) and len(list(cached)) == len(data)
    for i in range(-1, len(data)):
        torch.testing.assert_close(cached[i], alone(target, data, i), atol=1e-4, rtol=1e-4)
    assert (cached.target_layers, cached.data, cached.target) == (
        TARGET_LAYERS,
        data.fingerprint,
        target_fingerprint(target),
    )
    assert torch.equal(pickle.loads(pickle.dumps(cached))[4], cached[4]) and len(pickle.dumps(cached)) < 1000
    with pytest.raises(IndexError):
        cached[len(data)]


def test_interrupted_cache_resumes(
    tmp_path: Path, target: Target, data: TokenData, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]
) -> None:
    constants(hidden_states, SHARD_BYTES=20 * 2 * target.hidden_size * 4)

    def stop(done: int, total: int) -> None:
        if done > 40:  # in the third shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write(stop)
    with pytest.raises(
        ValueError, match=r"lacks hidden-states-00002\.safetensors; run the same `blockdraft hidden-states` command"
    ):
        read_hidden_states(tmp_path / "f")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "f").glob("hidden-states-*")}
    assert len(written) == 2
    monkeypatch.undo()  # the size of shards stays as it was
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    assert cache.need == 58 * 2 * target.hidden_size * 4
    cache.write()
    assert (
        written.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "f").glob("hidden-states-*")}.items()
    )
    torch.testing.assert_close(read_hidden_states(tmp_path / "f")[5], alone(target, data, 5), atol=1e-4, rtol=1e-4)


def test_full_disk_is_reported_at_the_start(
    tmp_path: Path, target: Target, data: TokenData, free_disk: Callable[[int], None]
) -> None:
    need = sum(LENGTHS) * 2 * target.hidden_size * 2
    free_disk(need - 1)
    with pytest.raises(ValueError, match=r"need 0\.0 MiB and .* has 0\.0 MiB free; choose fewer target layers"):
        plan_hidden_states(tmp_path / "new/f", target, data, TARGET_LAYERS, HiddenStateSettings()).write()
    assert not (tmp_path / "new").exists()
    free_disk(need)
    plan_hidden_states(tmp_path / "new/f", target, data, TARGET_LAYERS, HiddenStateSettings()).write()


def test_cache_of_another_target_or_data(tmp_path: Path, target: Target, data: TokenData) -> None:
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    cached = read_hidden_states(tmp_path / "f")
    cached.check(target, data, TARGET_LAYERS)
    others = made(tmp_path / "others", target, seed=1)
    for arguments, message in [
        (
            (target, data, (0, 1)),
            r"target_layers \(2, 0\) instead of \[0, 1\]|target_layers \[2, 0\] instead of \[0, 1\]",
        ),
        ((target, others, TARGET_LAYERS), "other hidden states: data "),
    ]:
        with pytest.raises(ValueError, match=message + ".*or run `blockdraft hidden-states` with another folder"):
            cached.check(*arguments)
        with pytest.raises(ValueError, match=message):
            plan_hidden_states(tmp_path / "f", *arguments, FLOAT)
    with pytest.raises(ValueError, match="dtype float32 instead of bfloat16"):
        plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, HiddenStateSettings())
    shutil.copytree(target.path, tmp_path / "target")  # type: ignore[arg-type]
    weights = load_file(tmp_path / "target/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.1
    save_file(weights, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="other hidden states: target "):
        cached.check(load_target(tmp_path / "target", device="cpu"), data, TARGET_LAYERS)


def test_reading_some_of_the_stored_layers(tmp_path: Path, target: Target, data: TokenData) -> None:
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    cached, (last, first) = read_hidden_states(tmp_path / "f"), alone(target, data, 1).chunk(2, dim=-1)
    for target_layers, expected in [
        ((0,), [first]),
        ((2,), [last]),
        ((0, 2), [first, last]),
        (TARGET_LAYERS, [last, first]),
    ]:
        cached.check(target, data, target_layers)
        torch.testing.assert_close(cached.of(1, target_layers), torch.cat(expected, dim=-1), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"other hidden states: target_layers \(2, 0\) instead of \[0, 1\]"):
        cached.check(target, data, (0, 1))


def test_broken_caches(tmp_path: Path, target: Target, data: TokenData) -> None:
    with pytest.raises(ValueError, match=r"hidden_states\.json does not exist"):
        read_hidden_states(tmp_path)
    plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT).write()
    save_file({"hidden_states": torch.zeros(3, 64)}, tmp_path / "f/hidden-states-00000.safetensors")
    with pytest.raises(ValueError, match="is broken .it holds 3 tokens instead of 81.; delete it"):
        read_hidden_states(tmp_path / "f")
    with pytest.raises(ValueError, match="holds other files"):
        plan_hidden_states(tmp_path / "data", target, data, TARGET_LAYERS, FLOAT)


def test_one_process_at_a_time(tmp_path: Path, target: Target, data: TokenData) -> None:
    cache = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    with held(tmp_path / "f", "computing features"), pytest.raises(ValueError, match="in use by process"):
        cache.write()
    assert not (tmp_path / "f").exists()


def test_cache_of_another_process_is_kept(tmp_path: Path, target: Target, data: TokenData) -> None:
    plans = [
        plan_hidden_states(tmp_path / "f", target, data, target_layers, FLOAT)
        for target_layers in (TARGET_LAYERS, (0, 2))
    ]
    same = plan_hidden_states(tmp_path / "f", target, data, TARGET_LAYERS, FLOAT)
    plans[0].write()
    with pytest.raises(ValueError, match=r"holds other hidden states: target_layers \[2, 0\] instead of \[0, 2\]"):
        plans[1].write()
    progress: list[int] = []
    same.write(lambda done, total: progress.append(total))
    assert progress == []
    read_hidden_states(tmp_path / "f").check(target, data, TARGET_LAYERS)


def test_batches_have_similar_lengths() -> None:
    assert list(batches([5, 1, 4, 9, 1], 10)) == [[3], [0, 2], [1, 4]]
    assert sorted(i for group in batches([50] * 3, 10) for i in group) == [0, 1, 2]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be 'bfloat16', 'float16' or 'float32', got 'int8'"):
        HiddenStateSettings(dtype="int8")
    with pytest.raises(ValueError, match="batch_tokens must be at least 1, got 0"):
        HiddenStateSettings(batch_tokens=0)
