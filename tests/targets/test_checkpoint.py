"""Names of checkpoints that are not on this machine, and facts of their configurations."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig

from blockdraft.drafters import load_drafter
from blockdraft.engine import Engine
from blockdraft.errors import UsageError
from blockdraft.targets import checkpoint, load_target, load_target_text
from blockdraft.types import Backend, Compile, SamplingParams
from blockdraft_diffusion.folder import FAMILY_OF


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None], tmp_path: Path) -> Iterator[None]:
    checkpoint.ask_hub.cache_clear()
    constants(huggingface_hub.constants, HF_HUB_OFFLINE=False, HF_HUB_CACHE=str(tmp_path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    huggingface_hub.close_session()
    yield
    checkpoint.ask_hub.cache_clear()
    huggingface_hub.close_session()


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("load", [load_target, load_target_text])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(load: object, constants: Callable[..., None]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        constants(huggingface_hub.constants, ENDPOINT=f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(
            ValueError, match="no/such is no folder here, and the hub cannot be reached .* local folder"
        ):
            load("no/such")  # type: ignore[operator]


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("load", [load_target, load_target_text])
def test_a_path_with_a_mistake_is_not_asked_for(
    load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, constants: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    constants(huggingface_hub.constants, ENDPOINT="http://127.0.0.1:9")  # the port that discards
    with pytest.raises(UsageError, match="There is no qwen in the folder models; correct the path"):
        load("models/qwen")
    with pytest.raises(UsageError, match="There is no file models/qwen.gguf"):
        load("models/qwen.gguf")


@pytest.mark.usefixtures("online")
def test_any_answer_of_the_hub_will_do_and_is_asked_for_once(constants: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        constants(huggingface_hub.constants, ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = Thread(target=answer)
        thread.start()
        checkpoint.check_hub("no/such", "config.json")
        thread.join()
    checkpoint.check_hub("no/other", "config.json")


@pytest.mark.usefixtures("online")
def test_what_is_on_this_machine_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("asked"))
    snapshot, refs = (tmp_path / "models--some--model" / name for name in ("snapshots/abc", "refs"))
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (snapshot / "config.json").touch()
    (refs / "main").write_text("abc")
    checkpoint.check_hub("some/model", "config.json")


@pytest.mark.parametrize("kind", sorted(FAMILY_OF))
@pytest.mark.parametrize("backend", ["auto", "hf", "native"])
def test_a_block_diffusion_model_is_no_target(tmp_path: Path, kind: str, backend: Backend) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError, match="is no target: `blockdraft diffusion generate --model .* writes with it"):
        load_target(tmp_path, device="cpu", backend=backend)


def test_heads_of_layers_that_differ_have_the_size_of_most() -> None:
    """As in Gemma 4, whose head sizes transformers gives by layer."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 12, "global_head_dim": 16}
    assert checkpoint.drafter_shape(Gemma4TextConfig(**sizes, layer_types=kinds))["head_dim"] == 12
    assert checkpoint.head_size(LlamaConfig(hidden_size=32, num_attention_heads=4)) == 8


@pytest.mark.parametrize(
    ("trained", "rope", "context"),
    [
        (128, None, 128),
        (
            128,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            512,
        ),  # as Qwen's cards write it
        (512, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # as DeepSeek does
        (128, {"rope_type": "yarn", "factor": 2.5}, 320),
        (128, {"type": "linear", "factor": 4.0}, 512),
        (128, {"type": "dynamic", "factor": 4.0}, 128),
        (
            1024,
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            1024,
        ),
    ],
)
def test_scaled_positions_extend_the_context(
    tmp_path: Path, tiny_target_dir: Path, trained: int, rope: dict[str, object] | None, context: int
) -> None:
    """vllm-project/vllm#53634, ggml-org/llama.cpp#17459: no factor is lost, and none applied twice."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_dir, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_scaling")}
    raw |= {"max_position_embeddings": trained, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(raw | ({"rope_scaling": rope} if rope else {})))
    assert load_target_text(folder).max_context == context
    backends: tuple[Backend, ...] = ("native", "hf")
    for backend in backends:
        assert load_target(folder, device="cpu", backend=backend).max_context == context


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_another_context(tiny_target_dir: Path, compile: Compile, caplog: pytest.LogCaptureFixture) -> None:
    """A context that is longer or shorter than the model's."""
    own = load_target(tiny_target_dir, device="cpu", compile=compile)
    ids = [5 + i % 50 for i in range(own.max_context + 20)]
    longer = load_target(tiny_target_dir, device="cpu", compile=compile, max_context=len(ids) + 4)
    assert f"and the model's is {own.max_context}; output beyond that may be poor" in caplog.text
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with Engine(longer, load_drafter("none", target=longer)) as engine:
        [completion] = engine.generate([ids], params)
    assert len(completion.token_ids) == 4
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert completion.token_ids == expected[0, len(ids) :].tolist()
    shorter = load_target(tiny_target_dir, device="cpu", compile=compile, max_context=16)
    with Engine(shorter, load_drafter("none", target=shorter)) as engine, pytest.raises(UsageError, match="context 16"):
        engine.generate([ids[:16]], params)
    with pytest.raises(UsageError, match="max_context must be at least 2, got 1"):
        load_target(tiny_target_dir, device="cpu", max_context=1)
