"""Projections: memory, plain and drafted speed, and where drafting loses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockdraft.errors import UsageError
from blockdraft.models import Drafter, known
from blockdraft.radar.acceptance import TASKS, expected, tau_of
from blockdraft.radar.devices import devices, find, machine_of
from blockdraft.radar.drafting import cost_of
from blockdraft.radar.memory import memory_of
from blockdraft.radar.project import batch_for, project
from blockdraft.radar.shape import cache_of, known_shapes, read_shape
from blockdraft.radar.step import BITS, constants

H100 = machine_of(find("H100 SXM"))
B200 = machine_of(find("B200 SXM"))
QWEN = read_shape("qwen3-8b")


def test_the_range_of_published_tau_is_without_our_small_drafter() -> None:
    [ours] = read_shape("smollm2").drafters
    other = Drafter(hub="o/d", kind=ours.kind, layout="any", source="https://example.org", block_size=ours.block_size)
    found = tau_of(other, "gsm8k")
    assert found.source == "like it" and found.low > tau_of(ours, "gsm8k").mid


def test_every_class_of_devices_has_constants() -> None:
    assert {device.kind for device in devices()} <= set(constants())


def test_one_stream_is_bound_by_reading_the_weights() -> None:
    row = project(QWEN, H100)
    physical = 1e9 * H100.bandwidth_gbs / (2 * (QWEN.parameters - QWEN.vocabulary * QWEN.hidden))
    assert row.why["bound"] == "memory"
    assert 0.4 * physical < row.plain.mid < physical


def test_nothing_is_faster_than_the_device() -> None:
    for shape in known_shapes():
        row = project(shape, H100, context=512)
        assert row.plain.mid * row.why["read_bytes"] < 1e9 * H100.bandwidth_gbs
        assert row.plain.low <= row.plain.mid <= row.plain.high
        if row.drafted:
            assert 0 < row.drafted.low <= row.drafted.mid <= row.drafted.high


@pytest.mark.parametrize(
    ("model", "plain", "drafted", "tau"), [("qwen3-8b", 230, 1175, 8.01), ("qwen3.5-27b", 84, 397, 7.93)]
)
def test_published_figures_of_a_b200(model: str, plain: float, drafted: float, tau: float) -> None:
    row = project(read_shape(model), B200, task="math500", block_size=16, tau=tau)
    assert row.plain.mid == pytest.approx(plain, rel=0.3)
    assert row.drafted is not None
    assert row.drafted.mid == pytest.approx(drafted, rel=0.3)


def test_weights_of_fewer_bits_are_faster_and_smaller() -> None:
    rows = [project(QWEN, H100, weights) for weights in ("bf16", "Q8_0", "Q4_K_M")]
    assert [row.plain.mid for row in rows] == sorted(row.plain.mid for row in rows)
    assert [row.memory_bytes for row in rows] == sorted((row.memory_bytes for row in rows), reverse=True)


def test_gain_shrinks_with_the_batch_and_drafting_loses_where_arithmetic_is_dear() -> None:
    gains = [project(QWEN, B200, batch=batch, block_size=16, task="chat").why["speedup"] for batch in (1, 32, 256)]
    assert gains == sorted(gains, reverse=True)
    slow = replace(H100, bf16=2.0)
    row = project(QWEN, slow, batch=32, task="chat", tau=2.0, block_size=16)
    assert row.why["drafting"] == "loses"
    assert row.why["block_bound"] == "arithmetic"


def test_blocks_are_shorter_in_larger_batches() -> None:
    one, many = (project(QWEN, H100, batch=batch, task="chat").block_size for batch in (1, 128))
    assert many < one


def test_mixture_reads_the_experts_that_any_token_meets() -> None:
    mixture = read_shape("qwen3-30b-a3b")
    one, many = project(mixture, H100, block_size=16).why["experts_read"]
    assert one == pytest.approx(mixture.experts_per_token, abs=0.1)
    assert many == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), abs=0.1)
    assert project(mixture, H100).plain.mid > project(read_shape("qwen3-32b"), H100).plain.mid


def test_memory_holds_weights_drafter_and_caches() -> None:
    row = project(QWEN, H100, context=8192, batch=4)
    parts = [row.why[f"{name}_bytes"] for name in ("weight", "drafter", "cache", "workspace")]
    assert sum(parts) == row.memory_bytes
    assert parts[0] == 2 * QWEN.parameters
    assert 2 * 36 * 8 * 128 * 2 * 4 * 8192 <= parts[2] < 1.3 * 2 * 36 * 8 * 128 * 2 * 4 * 8192
    assert row.fits
    assert not project(read_shape("llama-3.3-70b"), H100).fits


def test_windows_bound_the_cache() -> None:
    gemma = read_shape("gemma3-27b")
    growth = cache_of(gemma, 32768) - cache_of(gemma, 16384)
    assert growth == 2 * gemma.full_layers * gemma.full_numbers * 16384
    latent = read_shape("deepseek-v3")
    assert cache_of(latent, 1000) == 2 * 61 * 576 * 1000


def test_drafter_takes_memory() -> None:
    none = memory_of(QWEN, 16, 4096, 1, 1, None)
    some = memory_of(QWEN, 16, 4096, 1, 16, cost_of("dflash"))
    assert none["drafter"] == 0
    assert some["drafter"] == pytest.approx(2 * 1.05e9, rel=0.15)
    assert some["caches"] > none["caches"]


def test_nine_thousand_tokens_a_second_of_a_70b_are_a_batch() -> None:
    large = read_shape("llama-3.3-70b")
    alone = project(large, B200, "fp8", context=1024)
    assert alone.drafted is not None
    assert alone.drafted.high < 1500
    batch = batch_for(9000, large, B200, weights="nvfp4", context=256)
    assert batch is not None
    assert batch >= 32


def test_laptop_is_another_card() -> None:
    one, other = (project(QWEN, machine_of(find(name))) for name in ("RTX 4090", "RTX 4090 Laptop"))
    assert one.plain.mid > 1.3 * other.plain.mid


def test_several_devices_share_a_model() -> None:
    large = read_shape("llama-3.3-70b")
    row = project(large, machine_of(find("H100 SXM"), 4))
    assert row.fits
    assert row.device == "4x H100 SXM"
    assert 2 < row.plain.mid / project(large, H100).plain.mid < 4


def test_confidence_widens_the_interval() -> None:
    own = constants()["nvidia-datacentre"]
    known_here = project(QWEN, H100, constant=replace(own, devices=("H100 SXM",)))
    of_class = project(QWEN, H100, constant=replace(own, devices=()))
    assert (known_here.confidence, of_class.confidence) == ("device", "class")
    assert known_here.plain.high < of_class.plain.high
    from_draft = project(QWEN, H100, constant=replace(own, devices=(), reported=False))
    assert from_draft.confidence == "extrapolated"
    assert from_draft.plain.low < of_class.plain.low


def test_context_of_one_token_drafts_nothing() -> None:
    row = project(QWEN, H100, context=1)
    assert row.drafted is None
    assert row.block_size == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": 0}, "context is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"context": 10**6}, "made for 40960"),
        ({"weights": "int3"}, "no kind of weights"),
    ],
)
def test_bad_input(options: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        project(QWEN, H100, **options)  # type: ignore[arg-type]


def test_memory_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 0"):
        machine_of(find("Ryzen 9 9950X"), ram_gb=0)
    with pytest.raises(UsageError, match="1 or more"):
        machine_of(find("RTX 4090"), 0)


def test_tau_is_published_or_the_range_of_drafters_like_it() -> None:
    [drafter] = [each for each in known("qwen3-8b").drafters if each.hub == "z-lab/Qwen3-8B-DFlash-b16"]
    tau = tau_of(drafter, "math500")
    assert (tau.mid, tau.block_size, tau.source) == (7.87, 16, "published")
    code = tau_of(drafter, "code")
    assert code.mid == pytest.approx((6.5 + 5.95 + 7.27) / 3)
    unknown = tau_of(None, "chat")
    assert unknown.source == "like it"
    assert 1 < unknown.low <= unknown.mid <= unknown.high
    assert all(tau_of(None, task).mid > 1 for task in TASKS)


def test_tau_of_another_block_size() -> None:
    """Published of Qwen3.5-27B: 7.93 with blocks of 16 and 5.90 with 8."""
    sixteen = next(each for each in known("qwen3.5-27b").drafters if each.kind == "dflash")
    tau = tau_of(sixteen, "math500")
    eight = tau.at(8)[1]
    assert tau.mid == 7.93
    assert eight == pytest.approx(5.9, rel=0.1)
    assert expected(1.0, 8) == 8


def test_first_token_takes_arithmetic() -> None:
    short, long = (project(QWEN, H100, context=context).first_token_seconds for context in (1024, 32768))
    assert 8 < long / short < 64


def test_all_kinds_of_weights_project() -> None:
    for weights in BITS:
        assert project(QWEN, H100, weights).plain.mid > 0
