"""Let the target respond and train a drafter, each for some minutes of one GPU, from what `gpu_inputs.py` prepared.

on_gpu.py --inputs build/gpu --init DRAFTER --out build/on-gpu --respond 150 --train 240

1. The parts of the target's file are joined.
2. The target responds to prompts, hundreds at once, until the time is over. The tokens are those of the dequantized
   weights in bfloat16; near ties may be decided otherwise than on a CPU. `responses.npz` keeps them.
3. The draft vocabulary becomes the most frequent supervised tokens. Rows of the head that were not there before are the
   target's.
4. The drafter learns from documents and responses until its time is over. Learning rates follow the clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from chats import ChatTokens
from responses import FIM_ENDS, PROMPT_TOKENS, REPEAT, beginning, unfit
from safetensors.torch import load_file, save_file

from blockdraft import SamplingParams, load_target
from blockdraft.targets import embedding_and_head
from blockdraft.targets.native import NativeTarget
from blockdraft.types import LoadOptions
from blockdraft_train import hidden_state_sources
from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.loops import KEPT_TOKENS, loop_begin
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter
from blockdraft_train.devices import make_accelerator
from blockdraft_train.job import TrainingJob
from blockdraft_train.progress import Progress
from blockdraft_train.schedule import Schedule
from blockdraft_train.trainer import Trainer
from blockdraft_train.variants.eagle3 import Eagle3Recipe

sys.path.insert(0, str(Path(__file__).parents[1] / "smollm2"))
import batched  # noqa: E402

CHECKED = 192  # tokens of a response between two searches for repetition, for which the GPU waits
SLOTS = 1152  # of a sequence: the longest prompt and response
OPENING_TEMPERATURE = 0.9
LONGEST = 1024  # tokens of a document
SECONDS = 10  # between two lines of progress
WARMUP, ALWAYS = 0.04, 10**9
SHARE_OF_DEVICE = 0.75  # of the free memory, for hidden states: more than by default, since nothing else runs


def join(inputs: Path, file: Path) -> Path:
    """Join the parts of the target's file."""
    decompressed = zlib.decompressobj(wbits=31)
    with file.open("wb") as out:
        for part in sorted(inputs.glob("target.*.gz")):
            out.write(decompressed.decompress(part.read_bytes()))
        out.write(decompressed.flush())
    if not decompressed.eof:
        raise SystemExit(f"The parts of the target in {inputs} are not complete.")
    return file


class Responses:
    """Turns prompts into requests, and tokens into documents."""

    def __init__(self, target: NativeTarget) -> None:
        assert target.tokenizer is not None
        self._tokenizer, self._chats = target.tokenizer, ChatTokens(target.tokenizer)
        vocabulary = target.tokenizer.get_vocab()
        self.ends = sorted({vocabulary[end] for end in FIM_ENDS if end in vocabulary} | set(target.eos_token_ids))
        self._openings: set[str] = set()
        self.counts = Counter[str]()
        self.documents: list[tuple[str, Document]] = []

    def request(self, prompt: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """Return the tokens to continue, and how."""
        if "opening" in prompt:
            return prompt["ids"], SamplingParams(PROMPT_TOKENS, OPENING_TEMPERATURE)
        return prompt["ids"], SamplingParams(prompt["tokens"], prompt["temperature"])

    def add(self, prompt: dict[str, Any], response: list[int]) -> dict[str, Any] | None:
        """Store a response. Return the prompt that an opening has become, which is still to be responded to."""
        self.counts["tokens"] += len(response)
        if "opening" in prompt:
            return self._asked(prompt, response)
        begin = loop_begin(response, **REPEAT)
        response = response[:begin]
        if prompt.get("fim"):
            response = response[: 1 + next((i for i, t in enumerate(response) if t in self.ends), len(response))]
        if len(response) < (2 if prompt.get("fim") else KEPT_TOKENS):
            self.counts["dropped"] += 1
            return None
        ids = prompt["ids"]
        # Around a hole is code, as good to learn from as the response.
        supervised = [bool(prompt.get("fim"))] * len(ids) + [True] * len(response)
        tokens = torch.tensor((ids + response)[:LONGEST])
        self.documents.append((prompt["id"], Document(tokens, torch.tensor(supervised[:LONGEST]))))
        self.counts["documents"] += 1
        return None

    def _asked(self, prompt: dict[str, Any], response: list[int]) -> dict[str, Any] | None:
        stop, text = prompt["stop"], str(self._tokenizer.decode(response, skip_special_tokens=True))
        ended = response[-1] in self.ends or stop in text
        text = prompt["opening"] + text.partition(stop)[0].rstrip() + (stop if "```" in stop else "")
        if not ended or unfit(text, set()) or beginning(text) in self._openings:
            self.counts["dropped"] += 1
            return None
        self._openings.add(beginning(text))
        task = {name: prompt.get(name) for name in ("system", "tools")}
        fields = {name: prompt[name] for name in ("id", "temperature", "tokens")}
        return fields | {"ids": self._chats.first_turn(task, text)}


def respond(
    target: NativeTarget, prompts: Sequence[dict[str, Any]], rows: int, seconds: float
) -> list[tuple[str, Document]]:
    """Return responses, as documents with the ids of their prompts."""
    responses = Responses(target)
    batched.CHECKED = CHECKED
    responder = batched.BatchedResponder(target, rows, SLOTS, ends=responses.ends, halvings=0)
    began = reported = time.monotonic()
    running: dict[int, dict[str, Any]] = {}
    waiting, keys = iter(prompts), iter(range(ALWAYS))

    def submit(prompt: dict[str, Any]) -> None:
        ids, params = responses.request(prompt)
        if len(ids) < SLOTS:
            running[key := next(keys)] = prompt
            responder.submit(key, (), ids, params)

    while time.monotonic() - began < seconds:
        while len(running) < responder.at_once and (prompt := next(waiting, None)) is not None:
            submit(prompt)
        if not running:
            break
        for key, response in responder.responses():
            assert response.token_ids is not None
            if (prompt := responses.add(running.pop(key), response.token_ids)) is not None:
                submit(prompt)
        if (now := time.monotonic()) - reported > SECONDS:
            reported = now
            print(f"{now - began:.0f} s: {dict(responses.counts)}", flush=True)
    for key, token_ids in responder.unfinished():
        if "opening" not in running[key]:
            responses.add(running[key], token_ids)
    taken = time.monotonic() - began
    print(f"{dict(responses.counts)}, {responses.counts['tokens'] / taken:,.0f} tokens/s", flush=True)
    return responses.documents


def read_documents(file: Path) -> Iterator[Document]:
    """Yield the documents of `gpu_inputs.py`, or the responses of an earlier call."""
    stored, begin = np.load(file), 0
    tokens, supervised = torch.from_numpy(stored["tokens"]).long(), torch.from_numpy(stored["supervised"])
    for length in stored["lengths"].tolist():
        yield Document(tokens[begin : begin + length], supervised[begin : begin + length])
        begin += length


def write_responses(file: Path, found: Sequence[tuple[str, Document]]) -> None:
    np.savez_compressed(
        file,
        ids=np.array([name for name, _ in found]),
        tokens=torch.cat([document.tokens for _, document in found]).numpy().astype(np.int32),
        supervised=torch.cat([document.supervised for _, document in found]).numpy(),
        lengths=np.array([len(document.tokens) for _, document in found], dtype=np.int32),
    )


def with_vocabulary(init: Path, out: Path, documents: Sequence[Document], head: torch.Tensor) -> Path:
    """Write the drafter in `init` with the most frequent supervised tokens as its draft vocabulary."""
    tensors = load_file(init / "model.safetensors")
    size = len(tensors["d2t"])
    counts = torch.zeros(len(head), dtype=torch.int64)
    for document in documents:
        counts += torch.bincount(document.tokens[document.supervised], minlength=len(head))
    chosen = counts.topk(size).indices.sort().values
    before = torch.arange(size) + tensors["d2t"].long()
    place = torch.full((len(head),), -1)
    place[before] = torch.arange(size)
    weight = tensors["lm_head.weight"]
    known = place[chosen] >= 0
    tensors["lm_head.weight"] = torch.where(
        known[:, None], weight[place[chosen].clamp(min=0)], head[chosen.to(head.device)].to(weight.dtype).cpu()
    )
    tensors["d2t"] = (chosen - torch.arange(size)).to(tensors["d2t"].dtype)
    if "t2d" in tensors:
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, chosen, True)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((init / "config.json").read_bytes())
    covered = counts[chosen].sum() / counts.sum()
    print(f"{int((~known).sum())} of {size} draft tokens are new; they cover {covered:.1%}", flush=True)
    return out


class ClockSchedule(Schedule):
    """Rates that rise and then fall to 0 within some seconds, which begin with the first step."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._last = seconds, 0.0, 0.0
        self._end = ALWAYS

    @property
    def end(self) -> int:
        return self._end

    @property
    def finishing(self) -> bool:
        return False

    def saved(self) -> dict[str, Any]:
        return {"asked": self._end, "stretches": [{"begin": 0, "end": self._end, "planned": self._end}]}

    def rate(self, step: int) -> float:
        now = time.monotonic()
        if not step:
            self._began = now
        past = (now - self._began) / self._seconds
        if past + 1.5 * (now - self._last) / self._seconds >= 1 and step:  # the next step would end too late
            self._end = step + 1
        self._last = now
        return min(1.0, past / WARMUP) if past < WARMUP else max(0.0, (1 - past) / (1 - WARMUP))


def train(target: NativeTarget, data: Path, recipe: Eagle3Recipe, out: Path, seconds: float, device: str) -> None:
    """Train until the time is over."""
    if device != "cpu":
        hidden_state_sources.SHARE_OF_DEVICE = SHARE_OF_DEVICE
    reported = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported > SECONDS:
            reported = now
            print(stage, flush=True)

    progress = Progress(report=report, note=lambda text: print(text, flush=True))
    accelerator = make_accelerator(recipe, out, device)
    job = TrainingJob(
        "eagle3", target, read_data(data), out, recipe, accelerator, progress=progress, other_responses=True
    )
    trainer = Trainer(job)
    trainer.schedule = ClockSchedule(seconds)
    trainer.run()


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, default=Path("build/gpu"))
    parser.add_argument("--target", type=Path, help="the whole GGUF file; by default the parts are joined")
    parser.add_argument("--init", type=Path, required=True, help="folder of the drafter to start from")
    parser.add_argument("--out", type=Path, default=Path("build/on-gpu"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=768, help="sequences that the target continues at once")
    parser.add_argument("--respond", type=float, default=150, help="seconds of responses")
    parser.add_argument("--train", type=float, default=240, help="seconds of training")
    parser.add_argument("--documents", type=int, help="most documents of documents.npz")
    parser.add_argument("--held-out", type=int, default=64, help="documents to measure the loss on")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--muon-learning-rate", type=float, default=0.02)
    args = parser.parse_args(words)

    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.target or join(args.inputs, args.out / "target.gguf")
    options = LoadOptions(dtype="bfloat16", device=args.device, backend="native", compile="off")
    target = cast(NativeTarget, load_target(file, options))
    print(f"{time.monotonic() - began:.0f} s: target loaded on {target.device}", flush=True)
    responses = args.out / "responses.npz"
    if not responses.exists():
        with gzip.open(args.inputs / "prompts.json.gz", "rt", encoding="utf-8") as prompts:
            write_responses(responses, respond(target, json.load(prompts), args.rows, args.respond))
        torch.cuda.empty_cache()
    documents = [*read_documents(responses), *list(read_documents(args.inputs / "documents.npz"))[: args.documents]]
    init = with_vocabulary(args.init, args.out / "init", documents, embedding_and_head(target)[1])
    writer = DataWriter(
        args.out / "data", {"tokenizer": tokenizer_fingerprint(target.tokenizer), "written_by": {"writer": "people"}}
    )
    writer.begin()
    for number, document in enumerate(documents):
        if number not in writer.done:
            writer.add(number, [document])
    print(f"{time.monotonic() - began:.0f} s: {writer.finish()['counts']}", flush=True)
    recipe = Eagle3Recipe(
        init=str(init),
        block_size=5,
        length=LONGEST,
        batch=args.batch,
        anchors=args.anchors,
        chunk=4096,
        held_out=args.held_out,
        hidden_states="memory" if args.device != "cpu" else None,
        optimizer="muon",
        learning_rate=args.learning_rate,
        muon_learning_rate=args.muon_learning_rate,
        qat_bits=4,
        eval_every=0,
        eval_prompts=0,
        save_every=0,
        save_minutes=1.5,
        keep=1,
        trackers=(),
    )
    train(target, args.out / "data", replace(recipe, steps=ALWAYS), args.out / "drafter", args.train, args.device)
    print(f"{time.monotonic() - began:.0f} s: done", flush=True)


if __name__ == "__main__":
    main()
