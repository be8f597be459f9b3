"""Cached weights are written once, mapped later, and made again if they are damaged or outdated."""

import gc
import json
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from blockdraft.kernels.cpu import weight_cache
from blockdraft.kernels.cpu.build import build
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.weight_cache import CachedWeights, Origin, cached_weights
from blockdraft.machine import set_weights_limit, weights_limit
from blockdraft.nn.packed import PackedLinear, PackedWeight, pack_weights
from blockdraft.nn.quantization import QuantizedWeight
from blockdraft.nn.quantize_weight import quantize_weight

PRODUCTS = [["table"], ["query", "key"], ["few"], ["shifted"]]
BIASED = torch.arange(35.0)


def library() -> Library:
    actual = build(torch.float32, torch.float32, integers=True).library()
    assert actual is not None
    return actual


def other_libraries() -> tuple[Library | None, Library | None]:
    return build(torch.float32, torch.float32, 4).library(), build(torch.bfloat16, torch.float32).library()


def weights() -> dict[str, Tensor | QuantizedWeight]:
    generator = torch.Generator().manual_seed(3)
    plain = {name: torch.randn(size, 16, generator=generator) for name, size in (("table", 35), ("query", 24))}
    few = quantize_weight(torch.randn(40, 32, generator=generator), 4, 16)
    codes = torch.randint(0, 16, (24, 32), generator=generator, dtype=torch.int8)
    shifted = QuantizedWeight(codes, few.scale[:24], torch.randn(24, 2, generator=generator), 4)
    return {**plain, "key": torch.randn(8, 16, generator=generator), "few": few, "shifted": shifted}


class Maker:
    """Packs weights, and records the calls."""

    def __init__(self) -> None:
        self.made: list[Sequence[str]] = []

    def __call__(self, names: Sequence[str]) -> PackedWeight:
        self.made.append(names)
        own = weights()
        return pack_weights([own[name] for name in names], library())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None]) -> Path:
    library()  # from the cache folder that the tests share
    other_libraries()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weight_cache.SWITCH, raising=False)
    constants(weight_cache, MIN_BYTES=2 << 16)  # the size of `origin`
    weight_cache.tell_once.cache_clear()
    return tmp_path / "cache" / "weights"


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    files = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    for file in files:
        file.write_bytes(os.urandom(1 << 16))
    return Origin(files, {"dtype": "float32"})


def open_kept(origin: Origin, maker: Callable[[Sequence[str]], PackedWeight]) -> CachedWeights | None:
    return cached_weights(origin, library(), PRODUCTS, maker)


def assert_same_products(actual: CachedWeights) -> None:
    torch.manual_seed(0)
    for names in PRODUCTS:
        mine, own = actual.matrix(names), Maker()(names)
        bias = BIASED if names == ["table"] else None
        layers = PackedLinear(mine, bias), PackedLinear(own, bias)
        x = torch.randn(5, mine.inputs)
        assert torch.equal(layers[0](x), layers[1](x)) and torch.equal(layers[0].weight, layers[1].weight)
        assert layers[0].nbytes == layers[1].nbytes


@pytest.mark.slow
def test_what_is_kept_is_made_once_and_gives_the_same_bits(origin: Origin, folder: Path) -> None:
    maker = Maker()
    first = open_kept(origin, maker)
    assert first is not None and maker.made == PRODUCTS
    assert_same_products(first)
    second = open_kept(origin, maker)
    assert second is not None and maker.made == PRODUCTS
    assert_same_products(second)
    assert [file.suffix for file in folder.iterdir()] == [".weights"]


def test_a_number_that_is_changed_by_mistake_stays_as_it_is_for_others(origin: Origin) -> None:
    first = open_kept(origin, Maker())
    assert first is not None
    data = first.matrix(["table"]).data
    assert isinstance(data, Tensor)
    data.fill_(7)
    second = open_kept(origin, Maker())
    assert second is not None
    assert_same_products(second)


def test_what_is_deleted_while_it_is_mapped_goes_on_working(origin: Origin) -> None:
    actual = open_kept(origin, Maker())
    assert actual is not None
    origin.path(library()).unlink()
    assert_same_products(actual)


def test_the_least_recently_used_are_deleted_beyond_the_limit(origin: Origin, folder: Path) -> None:
    def made(**options: int) -> Path:
        other = replace(origin, options=options)
        assert open_kept(other, Maker()) is not None
        return other.path(library())

    old, used = folder / "0.weights", folder / "1.weights"
    folder.mkdir(parents=True, exist_ok=True)
    for seconds, file in enumerate((old, used), 10):
        file.write_bytes(bytes(1000))
        os.utime(file, (seconds, seconds))
    assert weights_limit() <= 20 * 10**9
    size = made(n=1).stat().st_size
    assert old.exists() and used.exists()
    set_weights_limit(2 * size + 1999)
    made(n=2)
    assert not old.exists() and used.exists()
    set_weights_limit(0)
    made(n=3)
    assert len(list(folder.glob("*.weights"))) == 3 and not used.exists()  # this process has them mapped


def overwrite(file: Path, keep_time: bool) -> None:
    actual = file.stat()
    file.write_bytes(os.urandom(actual.st_size))
    if keep_time:
        os.utime(file, ns=(actual.st_atime_ns, actual.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda origin: overwrite(origin.files[1], keep_time=False),
        lambda origin: overwrite(origin.files[1], keep_time=True),
        lambda origin: os.utime(origin.files[0], ns=(1, 1)),
        lambda origin: origin.files[0].write_bytes(origin.files[0].read_bytes() + b"more"),
    ],
    ids=["other", "other of the same time", "newer", "longer"],
)
def test_another_checkpoint_at_its_place_takes_its_place(
    origin: Origin, folder: Path, change: Callable[[Origin], object]
) -> None:
    open_kept(origin, Maker())
    change(origin)
    maker = Maker()
    assert open_kept(origin, maker) is not None
    assert maker.made == PRODUCTS and len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_other_options_kernels_and_code_are_not_mixed_up(origin: Origin, constants: Callable[..., None]) -> None:
    open_kept(origin, Maker())
    other = Origin(origin.files, {"dtype": "bfloat16"})
    assert other.path(library()) != origin.path(library())
    assert Origin(origin.files[:1], origin.options).path(library()) != origin.path(library())
    narrow, halved = other_libraries()
    assert narrow is not None and halved is not None and narrow.lanes < library().lanes
    assert len({origin.path(each) for each in (library(), narrow, halved)}) == 3
    maker = Maker()
    constants(weight_cache, LAYOUT=99)
    open_kept(origin, maker)
    assert maker.made == PRODUCTS
    maker = Maker()
    cached_weights(origin, library(), PRODUCTS[:2], maker)
    assert maker.made == PRODUCTS[:2]


def header_of(content: bytes) -> dict[str, Any]:
    end = len(content) - weight_cache.LENGTH_BYTES - weight_cache.DIGEST_BYTES
    length = int.from_bytes(content[end : end + weight_cache.LENGTH_BYTES], "little")
    actual: dict[str, Any] = json.loads(content[end - length : end])
    return actual


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"more",
        lambda content: bytes(len(content)),
        lambda content: b"\0" + content[1:],  # the first byte of the first matrix
        lambda content: content[:-100] + b"x" + content[-99:],  # in the header
        lambda content: content[:-40] + b"\xff" * 8 + content[-32:],  # its length
    ],
)
def test_what_is_cut_short_or_corrupt_is_made_anew(origin: Origin, spoil: Callable[[bytes], bytes]) -> None:
    open_kept(origin, Maker())
    path = origin.path(library())
    content = path.read_bytes()
    path.write_bytes(spoil(content))
    maker = Maker()
    actual = open_kept(origin, maker)
    assert actual is not None and maker.made == PRODUCTS
    assert_same_products(actual)
    assert path.read_bytes() == content


def test_each_matrix_is_looked_at(origin: Origin) -> None:
    open_kept(origin, Maker())
    path = origin.path(library())
    content = path.read_bytes()
    for matrix in header_of(content)["matrices"].values():
        for part in matrix["parts"].values():
            assert part["begin"] % weight_cache.ALIGNMENT == 0
            at = part["end"] - 1
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            maker = Maker()
            open_kept(origin, maker)
            assert maker.made == PRODUCTS, part


def test_small_checkpoints_and_those_that_are_not_to_be_kept_are_not(
    origin: Origin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_kept(Origin(origin.files[:1], origin.options), Maker()) is None
    monkeypatch.setenv(weight_cache.SWITCH, "0")
    assert open_kept(origin, Maker()) is None and not folder.exists()
    monkeypatch.setenv(weight_cache.SWITCH, "1")
    assert open_kept(origin, Maker()) is not None
    monkeypatch.setenv(weight_cache.SWITCH, "0")
    assert open_kept(origin, Maker()) is None


def test_a_full_disk_is_reported_once_and_leaves_nothing(
    origin: Origin, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))  # within the third matrix
    try:
        assert open_kept(origin, Maker()) is None and open_kept(origin, Maker()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [record] = caplog.records
    assert "File too large" in record.message and str(folder) in record.message
    assert weight_cache.SWITCH in record.message and not list(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_reported(
    origin: Origin, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("a file")
    assert open_kept(origin, Maker()) is None
    assert len(caplog.records) == 1


def test_what_goes_wrong_while_weights_are_made_leaves_nothing(origin: Origin, folder: Path) -> None:
    def fails(names: Sequence[str]) -> PackedWeight:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_kept(origin, fails)
    assert not list(folder.iterdir())


def test_while_another_process_writes_nothing_is_kept_here(
    origin: Origin, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    with FileLock(origin.path(library()).with_suffix(".lock")):
        assert open_kept(origin, Maker()) is None
    assert not caplog.records
    assert open_kept(origin, Maker()) is not None


def _write_in_parts(origins: Sequence[Origin], ready: Any, go_on: Any) -> None:
    weight_cache.MIN_BYTES = 1
    for origin in origins:
        made = Maker()

        def slowly(names: Sequence[str], made: Maker = made) -> PackedWeight:
            if len(made.made) == 2:
                ready.release()
                go_on.acquire()
            return made(names)

        open_kept(origin, slowly)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_processes_at_once_and_one_that_is_killed_while_it_writes(origin: Origin, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, go_on = context.Semaphore(0), context.Semaphore(0)
    whole, killed = origin, replace(origin, options={"n": 1})
    other = context.Process(target=_write_in_parts, args=([whole, killed], ready, go_on), daemon=True)
    other.start()
    assert ready.acquire(timeout=120)
    assert open_kept(whole, Maker()) is None  # the other process is writing it
    go_on.release()
    assert ready.acquire(timeout=120)
    assert open_kept(killed, Maker()) is None
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    for kept, made in ((whole, []), (killed, PRODUCTS)):
        maker = Maker()
        weights = open_kept(kept, maker)
        assert weights is not None and maker.made == made
        assert_same_products(weights)
    assert {file.suffix for file in folder.iterdir()} == {".weights"}


def test_a_weight_stays_mapped_as_long_as_it_is_used(origin: Origin) -> None:
    actual = open_kept(origin, Maker())
    assert actual is not None
    gone = weakref.ref(actual)
    layer = PackedLinear(actual.matrix(["query", "key"]))
    del actual
    gc.collect()
    assert gone() is None
    assert torch.equal(layer.weight, PackedLinear(Maker()(["query", "key"])).weight)
    assert isinstance(layer.weight, Tensor)
