"""llama.cpp as outside judge of the GGUF files that we write: its tokens, and how many drafts it accepts, are ours."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers.adapters.llama_cpp import PROGRAM
from benchmarks.server import chats
from benchmarks.server.servers import HOST, LLAMA_SERVER, Server, llama
from beside import TOKENS, Ours, accepts_alike, need, peer
from transformers import AutoTokenizer, Qwen3ForCausalLM

from blockdraft.drafters import TINY_DRAFTER
from blockdraft.formats import Borrowed, Checkpoint, read_drafter, speculators, zlab
from blockdraft.nn.draft_config import LayerAttention
from blockdraft.targets import BUNDLED as TARGET
from blockdraft_tools.export import export_gguf

pytestmark = pytest.mark.llamacpp
DRAFTER = TINY_DRAFTER
TOOL = PROGRAM.with_name("llama-speculative-simple")
PROMPTS, DRAFT_CHOICE = 50, 15
NEAR = 0.03  # share by which the tokens of a step may differ
F32 = ["--cache-type-k", "f32", "--cache-type-v", "f32", "--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled pair in float32: target, drafter."""
    done = export_gguf(DRAFTER, tmp_path_factory.mktemp("gguf"), TARGET, "f32")
    return done.target, done.drafter


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    asked = [request["messages"] for request in chats.make(PROMPTS)]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in asked]


@pytest.fixture(scope="module")
def ours(prompts: list[list[int]]) -> Ours:
    return Ours(prompts, TARGET, DRAFTER)


def compare(answers: Sequence[tuple[list[int], int]], ours: Ours) -> None:
    """Tokens and steps of each prompt. llama.cpp scores blocks by other kernels than single tokens, and logits then
    differ by thousandths, so a few answers may part from its own plain ones; steps are compared on the others."""
    equal = [i for i, (tokens, _) in enumerate(answers) if tokens == ours.tokens[i]]
    assert len(equal) >= 0.94 * PROMPTS
    steps = sum(answers[i][1] for i in equal)
    assert steps == pytest.approx(sum(len(ours.committed[i]) for i in equal), rel=NEAR)


def test_tokens(files: tuple[Path, Path], prompts: list[list[int]], ours: Ours, tmp_path: Path) -> None:
    with peer(files[0], tmp_path / "log") as theirs:
        for prompt, tokens in zip(prompts, ours.tokens, strict=True):
            answer = theirs.ask("decode", {"prompt": prompt, "max_new_tokens": TOKENS, "stops": [2]})
            assert answer["tokens"] == tokens


def test_draft_tokens(files: tuple[Path, Path], prompts: list[list[int]], ours: Ours, tmp_path: Path) -> None:
    answers = []
    with peer(files[0], tmp_path / "log", files[1]) as theirs:
        for prompt in prompts:
            answers.append(theirs.ask("decode", {"prompt": prompt, "max_new_tokens": TOKENS, "stops": [2]}))
    assert ours.tau > 2
    compare([(answer["tokens"], answer["steps"]) for answer in answers], ours)


def test_its_speculative_tool(files: tuple[Path, Path], prompts: list[list[int]]) -> None:
    """It begins to draft with the last token of the prompt and ends behind so many tokens, and so does the count here.
    Answers that end earlier are left out: it also counts what is drafted after the end."""
    need(TOOL, "llama_tool")
    wanted = 32
    long = Ours(prompts, TARGET, DRAFTER, wanted + DRAFT_CHOICE + 1)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    theirs, own = Counter[str](), Counter[str]()
    chosen = [i for i, tokens in enumerate(long.tokens) if 2 not in tokens][:16]
    assert len(chosen) > 8
    for i in chosen:
        command = [
            TOOL,
            "-m",
            files[0],
            "-md",
            files[1],
            "--spec-type",
            "draft-dflash",
            "--spec-draft-n-max",
            DRAFT_CHOICE,
        ]
        command += ["-n", wanted, "--temp", 0, "-t", 1, "-c", 1024, *F32, "-p", tokenizer.decode(prompts[i])]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-2000:]
        if tokenizer.decode(long.tokens[i][: wanted - 1]) not in said:  # as in `compare`
            continue
        predicted, accepted = (int(re.findall(rf"{name}\s*= (\d+)", said)[-1]) for name in ("n_predict", "n_accept"))
        theirs.update(answers=1, tokens=predicted, steps=predicted - accepted)
        ends = list(accumulate(long.committed[i], initial=1))
        steps = next(step for step, end in enumerate(ends) if end > wanted)
        own.update(tokens=ends[steps], steps=steps + 1)  # with the one that gave the first token
    assert theirs["answers"] >= 0.9 * len(chosen)
    assert theirs["tokens"] / theirs["steps"] == pytest.approx(own["tokens"] / own["steps"], rel=NEAR)


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need(LLAMA_SERVER, "llama_server")
    more = [*F32, "--spec-draft-n-max", str(DRAFT_CHOICE)]
    found = llama(*files, tmp_path_factory.mktemp("server") / "log", 1, 1, 1024, more)
    yield found
    found.close()


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{HOST}:{server.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_its_server(server: Server, prompts: list[list[int]], ours: Ours) -> None:
    answers = []
    for prompt in prompts:
        body = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        answer = post(server, "/completion", body)
        tokens = answer["tokens"]
        answers.append((tokens, len(tokens) - 1 - answer["timings"]["draft_n_accepted"]))
    compare(answers, ours)


def test_texts_and_chats(server: Server, prompts: list[list[int]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for request, prompt in zip(chats.make(PROMPTS), prompts, strict=True):
        made = post(server, "/apply-template", {"messages": request["messages"]})["prompt"]
        assert made == tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, tokenize=False)
        assert post(server, "/tokenize", {"content": made, "parse_special": True})["tokens"] == prompt
    text = "They're 12345 naïve cafés;\n\tif x == 3:  # 東京 🙂\n"
    assert post(server, "/tokenize", {"content": text})["tokens"] == tokenizer(text)["input_ids"]


NEAR_LAYER = LayerAttention(True, 16)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("tiny_drafter_dir", {}),
    "causal": ("tiny_drafter_dir", {"layers": (LayerAttention(True, None),) * 2}),
    "windows": ("tiny_drafter_dir", {"layers": (LayerAttention(False, 16), LayerAttention(False, None))}),
    "causal windows": ("tiny_drafter_dir", {"layers": (NEAR_LAYER, NEAR_LAYER)}),
    "scaled": ("tiny_drafter_dir", {"input_embedding_scale": 3.0}),
    "linear": ("tiny_drafter_dir", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "yarn": (
        "tiny_drafter_dir",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "llama3": (
        "tiny_drafter_dir",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "reduced": ("tiny_drafter_dir", {}),
    "DFlash2": ("tiny_dflash2_dir", {}),
    "DSpark": ("tiny_dspark_dir", {}),
    "reduced DSpark": ("tiny_dspark_dir", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_drafter(variant: str, few_words: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Random models: that as many draft tokens are right as with us says that all is read as it was meant."""
    name, differences = VARIANTS[variant]
    found = read_drafter(request.getfixturevalue(name), None, 3)
    found = Checkpoint(replace(found.config, **differences), found.tensors)
    if "reduced" in variant:
        head = Qwen3ForCausalLM.from_pretrained(few_words).lm_head.weight.detach()
        embedding = Qwen3ForCausalLM.from_pretrained(few_words).model.embed_tokens.weight.detach()
        kept = torch.arange(0, len(head), 20)
        own = Borrowed(embedding, head[kept].contiguous(), kept)
        speculators.LAYOUT.write(tmp_path / "drafter", Checkpoint(found.config, found.tensors, own))
    else:
        zlab.write_checkpoint(tmp_path / "drafter", found.config, found.tensors)
    done = export_gguf(tmp_path / "drafter", tmp_path / "gguf", few_words, "f32")
    kind, draft_tokens = ("draft-dspark", 8) if "DSpark" in variant else ("draft-dflash", 7)
    accepts_alike(done, few_words, tmp_path / "drafter", kind, draft_tokens, tmp_path / "log")


def test_rounded_pairs_load(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Tokens may be others, but both forwards run."""
    for weights in ("f16", "bf16", "q8_0", "q4_0"):
        done = export_gguf(DRAFTER, tmp_path, TARGET, weights)  # type: ignore[arg-type]
        with peer(done.target, tmp_path / "log", done.drafter) as theirs:
            answer = theirs.ask("decode", {"prompt": [1, 60, 70, 80], "max_new_tokens": 24, "stops": []})
            assert len(answer["tokens"]) >= 24 and answer["steps"] < 24
