"""What is told of checkpoints that are not here."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
from transformers import AutoConfig, AutoTokenizer, Gemma4TextConfig, LlamaConfig

from blockdraft.diffusion.folder import FAMILY_OF
from blockdraft.errors import UsageError
from blockdraft.targets import checkpoint, load_target, load_target_text
from blockdraft.types import Backend


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    checkpoint._ask.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    huggingface_hub.close_session()
    yield
    checkpoint._ask.cache_clear()
    huggingface_hub.close_session()


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("load", [load_target, load_target_text])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(load: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for module in (AutoConfig, AutoTokenizer):
            monkeypatch.setattr(module, "from_pretrained", lambda *_, **__: pytest.fail("it is asked for many times"))
        with pytest.raises(
            ValueError, match="no/such is no folder here, and the hub cannot be reached .* local folder"
        ):
            load("no/such")  # type: ignore[operator]


@pytest.mark.usefixtures("online")
def test_any_answer_of_the_hub_will_do_and_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")

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
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    checkpoint.check_hub("some/model", "config.json")


@pytest.mark.parametrize("kind", sorted(FAMILY_OF))
@pytest.mark.parametrize("backend", ["auto", "hf", "native"])
def test_a_block_diffusion_model_is_no_target(tmp_path: Path, kind: str, backend: Backend) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UsageError, match="is no target: `blockdraft diffusion generate --model .* writes with it"):
        load_target(tmp_path, device="cpu", backend=backend)


def test_heads_of_layers_that_differ_have_the_size_of_most() -> None:
    """As Gemma 4's, which transformers tells only layer by layer."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 12, "global_head_dim": 16}
    assert checkpoint.drafter_shape(Gemma4TextConfig(**sizes, layer_types=kinds))["head_dim"] == 12
    assert checkpoint.head_size(LlamaConfig(hidden_size=32, num_attention_heads=4)) == 8
