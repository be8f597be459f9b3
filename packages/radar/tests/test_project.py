"""Projections: memory, plain and drafted speed, and when drafting is slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gguf import GGML_QUANT_SIZES

from blockdraft.decode.step_time import block_tokens as expected
from blockdraft.errors import UsageError
from blockdraft.models import known
from blockdraft_radar.devices import find, machine_of
from blockdraft_radar.drafting import TASKS, tau_of
from blockdraft_radar.project import batch_for, project
from blockdraft_radar.shape import known_shapes, kv_cache_bytes, read_shape
from blockdraft_radar.step import BITS, constants

H100 = machine_of(find("H100 SXM"))
B200 = machine_of(find("B200 SXM"))
QWEN = read_shape("qwen3-8b")


def test_batch_of_one_is_memory_bound() -> None:
    row = project(QWEN, H100)
    limit = 1e9 * H100.bandwidth_gbs / (2 * (QWEN.parameters - QWEN.vocabulary * QWEN.hidden))
    assert row.why["bound"] == "memory"
    assert 0.4 * limit < row.plain.mid < limit


def test_speed_is_below_the_device_limit() -> None:
    for shape in known_shapes():
        row = project(shape, H100, context=512)
        assert row.plain.mid * row.why["read_bytes"] < 1e9 * H100.bandwidth_gbs
        assert row.plain.low <= row.plain.mid <= row.plain.high
        if row.drafted:
            assert 0 < row.drafted.low <= row.drafted.mid <= row.drafted.high


@pytest.mark.parametrize(
    ("model", "plain", "drafted", "tau"), [("qwen3-8b", 230, 1175, 8.01), ("qwen3.5-27b", 84, 397, 7.93)]
)
def test_published_speeds_of_a_b200(model: str, plain: float, drafted: float, tau: float) -> None:
    row = project(read_shape(model), B200, task="math500", block_size=16, tau=tau)
    assert row.plain.mid == pytest.approx(plain, rel=0.3)
    assert row.drafted is not None
    assert row.drafted.mid == pytest.approx(drafted, rel=0.3)


def test_quantized_weights_are_faster_and_smaller() -> None:
    rows = [project(QWEN, H100, weights) for weights in ("bf16", "Q8_0", "Q4_K_M")]
    assert [row.plain.mid for row in rows] == sorted(row.plain.mid for row in rows)
    assert [row.memory_bytes for row in rows] == sorted((row.memory_bytes for row in rows), reverse=True)


def test_speedup_shrinks_with_the_batch_and_with_slow_arithmetic() -> None:
    gains = [project(QWEN, B200, batch=batch, block_size=16, task="chat").why["speedup"] for batch in (1, 32, 256)]
    assert gains == sorted(gains, reverse=True)
    slow = replace(H100, bf16=2.0)
    row = project(QWEN, slow, batch=32, task="chat", tau=2.0, block_size=16)
    assert row.why["drafting"] == "loses"
    assert row.why["block_bound"] == "arithmetic"


def test_blocks_are_shorter_in_larger_batches() -> None:
    small, large = (project(QWEN, H100, batch=batch, task="chat").block_size for batch in (1, 128))
    assert large < small


def test_mixture_reads_the_experts_that_any_token_uses() -> None:
    mixture = read_shape("qwen3-30b-a3b")
    plain, block = project(mixture, H100, block_size=16).why["experts_read"]
    assert plain == pytest.approx(mixture.experts_per_token, abs=0.1)
    assert block == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), abs=0.1)
    assert project(mixture, H100).plain.mid > project(read_shape("qwen3-32b"), H100).plain.mid


def test_drafting_loses_below_the_cost_of_a_block_in_plain_steps() -> None:
    """A block costs a mixture of experts more plain steps than a dense model, since it reads more experts."""
    mixture, dense = read_shape("qwen3-30b-a3b"), read_shape("qwen3-8b")
    needed, needed_dense = (project(shape, H100, block_size=8).why["least_tau"] for shape in (mixture, dense))
    assert needed > 1.5 * needed_dense
    for tau, verdict in ((0.9 * needed, "loses"), (1.1 * needed, "wins")):
        assert project(mixture, H100, block_size=8, tau=tau).why["drafting"] == verdict


def test_embeddings_per_layer_are_stored_but_not_read() -> None:
    gemma = read_shape("gemma4-e2b")
    row = project(gemma, H100, "bf16", context=128)
    assert row.why["weight_bytes"] == 2 * gemma.parameters
    assert 2 * gemma.active < row.why["read_bytes"] < 1.1 * 2 * gemma.active


def test_memory_is_the_sum_of_its_parts() -> None:
    row = project(QWEN, H100, context=8192, batch=4)
    parts = [row.why[f"{name}_bytes"] for name in ("weight", "drafter", "cache", "workspace")]
    assert sum(parts) == row.memory_bytes
    assert parts[0] == 2 * QWEN.parameters
    assert 2 * 36 * 8 * 128 * 2 * 4 * 8192 <= parts[2] < 1.3 * 2 * 36 * 8 * 128 * 2 * 4 * 8192
    assert row.fits
    assert not project(read_shape("llama-3.3-70b"), H100).fits


def test_cache_of_windows_and_latent_attention() -> None:
    gemma = read_shape("gemma3-27b")
    growth = kv_cache_bytes(gemma, 32768) - kv_cache_bytes(gemma, 16384)
    assert growth == 2 * gemma.full_layers * gemma.full_numbers * 16384
    latent = read_shape("deepseek-v3")
    assert kv_cache_bytes(latent, 1000) == 2 * 61 * 576 * 1000


def test_batch_for_a_speed() -> None:
    large = read_shape("llama-3.3-70b")
    alone = project(large, B200, "fp8", context=1024)
    assert alone.drafted is not None
    assert alone.drafted.high < 1500
    batch = batch_for(9000, large, B200, weights="nvfp4", context=256)
    assert batch is not None
    assert batch >= 32


def test_several_devices_share_a_model() -> None:
    large = read_shape("llama-3.3-70b")
    row = project(large, machine_of(find("H100 SXM"), 4))
    assert row.fits
    assert row.device == "4x H100 SXM"
    assert 2 < row.plain.mid / project(large, H100).plain.mid < 4


def test_interval_widens_with_less_confidence() -> None:
    constant = constants()["nvidia-datacentre"]
    of_device = project(QWEN, H100, constant=replace(constant, devices=("H100 SXM",)))
    of_class = project(QWEN, H100, constant=replace(constant, devices=()))
    assert (of_device.confidence, of_class.confidence) == ("device", "class")
    assert of_device.plain.high < of_class.plain.high
    extrapolated = project(QWEN, H100, constant=replace(constant, devices=(), reported=False))
    assert extrapolated.confidence == "extrapolated"
    assert extrapolated.plain.low < of_class.plain.low


def test_context_of_one_token_drafts_nothing() -> None:
    row = project(QWEN, H100, context=1)
    assert row.drafted is None
    assert row.block_size == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"context": 10**6}, "at most 40960"),
        ({"weights": "int3"}, "weights must be one of .*, got 'int3'"),
    ],
)
def test_bad_input(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        project(QWEN, H100, **options)  # type: ignore[arg-type]


def test_every_type_of_weights_in_gguf_files_has_bytes() -> None:
    for kind, (values, size) in GGML_QUANT_SIZES.items():
        if kind.name.startswith("I") and not kind.name.startswith("IQ"):  # integers
            assert kind.name not in BITS
        else:
            assert BITS[kind.name] == pytest.approx(8 * size / values, rel=0.1), kind  # mixtures have other types too
    assert BITS["F32"] == 32 and BITS["F16"] == BITS["BF16"] == 16 and BITS["Q4_K"] == 4.5
    for name in ("F16", "f16", "BF16", "bf16", "q4_k_m", "IQ4_xs"):
        assert project(QWEN, H100, weights=name).weights.lower() == name.lower()
    slow = project(QWEN, H100, weights="F32").plain
    assert slow == project(QWEN, H100, weights="fp32").plain != project(QWEN, H100, weights="F16").plain


def test_invalid_machine() -> None:
    with pytest.raises(UsageError, match="more than 0"):
        machine_of(find("Ryzen 9 9950X"), ram_gb=0)
    with pytest.raises(UsageError, match="1 or more"):
        machine_of(find("RTX 4090"), 0)


def test_tau_is_published_or_the_range_of_similar_drafters() -> None:
    [drafter] = [drafter for drafter in known("qwen3-8b").drafters if drafter.hub == "z-lab/Qwen3-8B-DFlash-b16"]
    tau = tau_of(drafter, "math500")
    assert (tau.mid, tau.block_size, tau.source) == (7.87, 16, "published")
    code = tau_of(drafter, "code")
    assert code.mid == pytest.approx((6.5 + 5.95 + 7.27) / 3)
    unknown = tau_of(None, "chat")
    assert unknown.source == "like it"
    assert 1 < unknown.low <= unknown.mid <= unknown.high
    assert all(tau_of(None, task).mid > 1 for task in TASKS)


def test_tau_of_another_block_size() -> None:
    """Published for Qwen3.5-27B: 7.93 at block size 16 and 5.90 at 8."""
    dflash = next(drafter for drafter in known("qwen3.5-27b").drafters if drafter.kind == "dflash")
    tau = tau_of(dflash, "math500")
    assert tau.mid == 7.93
    assert tau.at(8)[1] == pytest.approx(5.9, rel=0.1)
    assert expected(1.0, 8) == 8


def test_time_to_first_token_grows_with_the_context() -> None:
    short, long = (project(QWEN, H100, context=context).first_token_seconds for context in (1024, 32768))
    assert 8 < long / short < 64
