"""The peers: names, environments, adapters and their options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.peers import environments

OURS = ""  # the environment that the benchmark itself runs in
REFERENCE = "transformers"  # whose tokens are the right ones, and whose speed is 1
LLAMA = "llama.cpp"  # takes the reference's place for GGUF files
PLAIN = "ours plain"
DFLASH = "dflash"


@dataclass(frozen=True)
class Peer:
    """One way to decode.

    Attributes:
        environment: Its folder under build/peers, or `OURS`.
        adapter: File in adapters/ that speaks for it.
        does: Description in the table.
        options: Options of the adapter.
        speaks_here: Whether its adapter runs in our environment nevertheless.
        converts: Whether its adapter writes the models in a format of its own, once.
    """

    name: str
    environment: str
    adapter: str
    does: str
    options: dict[str, Any] = field(default_factory=dict)
    speaks_here: bool = False
    converts: bool = False

    @property
    def drafts(self) -> bool:
        """Whether it needs the drafter."""
        if self.is_ours:
            return self.options.get("drafter", "+").endswith("+")
        return self.options.get("draft") == "drafter" or self.options.get("drafts", False)

    @property
    def reads_files(self) -> bool:
        """Whether it reads GGUF files as they are."""
        other = {"backend", "quantize"} & set(self.options) or self.options.get("draft") == "assistant"
        return self.environment in (OURS, "llama_cpp") and not other

    @property
    def is_ours(self) -> bool:
        return self.environment == OURS

    def command(self) -> list[str]:
        python = sys.executable if self.is_ours or self.speaks_here else str(environments.python(self.environment))
        return [python, str(Path(__file__).parent / "adapters" / self.adapter)]

    def why_missing(self) -> str | None:
        return None if self.is_ours else environments.why_missing(self.environment)


def _transformers(name: str, mode: str, does: str) -> Peer:
    return Peer(name, "transformers", "hf_generate.py", does, {"mode": mode})


def _llama(name: str, does: str, **options: Any) -> Peer:
    return Peer(name, "llama_cpp", "llama_cpp.py", does, options, speaks_here=True, converts=True)


def _vllm(name: str, does: str, **options: Any) -> Peer:
    return Peer(name, "vllm", "vllm_engine.py", does, options)


def _openvino(name: str, does: str, **options: Any) -> Peer:
    return Peer(name, "openvino", "openvino_pipeline.py", does, options, converts=True)


def _ours(name: str, does: str, **options: Any) -> Peer:
    """Return a peer of ours. On a CPU target and drafter must run compiled, or the peer counts as missing."""
    return Peer(name, OURS, "ours.py", does, {"compiled": options.get("backend") != "hf", **options})


PEERS = (
    _transformers(REFERENCE, "plain", "`generate`"),
    _transformers("transformers compiled", "compiled", "static cache, `torch.compile`"),
    _transformers("transformers assistant", "assistant", "a smaller model drafts"),
    _transformers("transformers lookup", "lookup", "prompt lookup, 10 tokens"),
    _transformers("transformers dflash", "dflash", '`speculation_type="dflash"`'),
    Peer("dflash", "dflash", "zlab_dflash.py", "z-lab's package, `dflash_generate`"),
    _llama(LLAMA, "plain"),
    _llama("llama.cpp ngram-simple", "its defaults", speculator="ngram-simple"),
    _llama("llama.cpp ngram-cache", "its defaults", speculator="ngram-cache"),
    _llama("llama.cpp draft-simple", "a smaller model drafts", speculator="draft-simple", draft="assistant"),
    _llama("llama.cpp draft-dflash:1", "1 draft token", speculator="draft-dflash", draft="drafter", draft_tokens=1),
    # 3 draft tokens are its default, and its documentation asks for the whole block.
    _llama("llama.cpp draft-dflash:3", "3 draft tokens", speculator="draft-dflash", draft="drafter"),
    _llama("llama.cpp draft-dflash:7", "7 draft tokens", speculator="draft-dflash", draft="drafter", draft_tokens=7),
    _llama("llama.cpp draft-dflash:15", "15 draft tokens", speculator="draft-dflash", draft="drafter", draft_tokens=15),
    _vllm("vllm", "plain, without compiling"),
    _vllm("vllm dflash", "whole blocks", drafts=True),
    Peer("mistral.rs", "mistral_rs", "mistral_rs.py", "plain"),
    _openvino("openvino", "plain"),
    _openvino("openvino lookup", "prompt lookup, 10 tokens", lookup=True),
    _openvino("openvino dflash", "whole blocks", drafts=True),
    _openvino("openvino int8", "weights of 8 bits", bits=8),
    _openvino("openvino int4", "weights of 4 bits", bits=4),
    _ours(PLAIN, "the backend it chooses", drafter="none"),
    _ours("ours plain (hf)", "transformers as backend", drafter="none", backend="hf"),
    _ours("ours int8", "weights of 8 bits", drafter="none", quantize="int8"),
    _ours("ours int4", "weights of 4 bits", drafter="none", quantize="int4"),
    _ours("ours dflash", "chains of whole blocks"),
    _ours("ours dflash:4", "blocks of 4", drafting={"block_size": 4}),
    _ours("ours dflash:6", "blocks of 6", drafting={"block_size": 6}),
    _ours("ours dflash:auto", "blocks as long as pays", drafting={"block_size": "auto"}),
    _ours("ours lookup+dflash", "drafts of the text, too", drafter="lookup+", drafting={"block_size": "auto"}),
    _ours("ours ddtree", "trees of up to 32 draft tokens", drafting={"tree_budget": 32}),
    _ours("ours cost-aware", "trees as large as pays", drafting={"tree_budget": "auto"}),
)


def choose(names: Sequence[str] | None, kind: str | None = DFLASH, files: bool = False) -> list[Peer]:
    """Return the peers of these names, the reference and our plain decoding, in the order of the table.

    Args:
        kind: Of the drafter; where it is another than DFlash, it takes that name's place in names and speculators.
            None without a drafter.
        files: Whether the models are GGUF files, for which `LLAMA` is the reference.

    Raises:
        ValueError: An unknown name.
    """
    known = [peer for peer in PEERS if (not files or peer.reads_files) and (kind is not None or not peer.drafts)]
    for name in names or ():
        if name not in {peer.name for peer in known}:
            listed = ", ".join(sorted(peer.name for peer in known))
            raise ValueError(f"Peer {name!r} is unknown, or does not run these models; there are: {listed}.")
    always = {LLAMA if files else REFERENCE, PLAIN}
    chosen = [peer for peer in known if names is None or peer.name in {*names, *always}]
    if kind is None:
        return chosen
    return [replace(peer, name=_of_kind(peer.name, kind), options=_of_kind(peer.options, kind)) for peer in chosen]


def _of_kind(named: Any, kind: str) -> Any:
    if isinstance(named, dict):
        return {key: _of_kind(value, kind) for key, value in named.items()}
    return named.replace(DFLASH, kind) if isinstance(named, str) else named
