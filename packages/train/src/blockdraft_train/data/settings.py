"""Settings of sources, `blockdraft data` and `blockdraft hidden-states`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Count, Flag, Layers, settings
from blockdraft.types import SamplingParams

HiddenStateDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]

CONTINUED = 64  # prompt tokens of a text that a target without a chat template continues, by default
LONGEST = 3072  # default length of a document, as in arXiv 2602.06036, unless the target's context is shorter


@settings
class RecordSettings:
    """Records to read from a dataset."""

    split: str = Field("train", description="Split of a dataset that has several.")
    subset: str | None = Field(None, description="Subset (configuration) of a dataset that has several.")
    limit: Count | None = Field(None, description="Number of records to read, over all sources; by default all.")
    text_field: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Field that holds plain text. Each record is then a text."
    )
    prompt_field: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Field that holds the prompt. Each record is then a prompt."
    )
    response_field: Annotated[str | None, Flag(metavar="NAME")] = Field(
        None, description="Field that holds the response to the prompt."
    )

    def __post_init__(self) -> None:
        if self.text_field and (self.prompt_field or self.response_field):
            raise UsageError(
                "text_field and prompt_field exclude each other: a record is either a text or a conversation. Name "
                "only one of them."
            )


@settings
class DataSettings:
    """How records become documents."""

    length: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Maximum length of a document in tokens. Longer chats are cut; longer texts make several "
        f"documents. By default the target's context, but at most {LONGEST}.",
    )
    template_args: Annotated[str, Flag(metavar="JSON")] = Field(
        "{}", description="Extra arguments of the chat template, as a JSON object."
    )
    split_turns: bool = Field(
        False,
        description="Make one document per response, with the messages before it, instead of one per chat. Use it for "
        "chat templates that render earlier turns differently later on.",
    )
    writer: Literal["text", "target", "server"] = Field(
        "text", description='Writer of the responses: the records themselves ("text"), our engine, or a server.'
    )
    skip_faulty: bool = Field(
        False,
        description="Skip and count records that cannot be used, such as chats that the chat template refuses. "
        "Otherwise they are listed, and nothing is made.",
    )
    continued: Annotated[Count | None, Flag("--continue")] = Field(
        None,
        description="Let the target continue plain texts from their first N tokens, without a chat template. By "
        f"default only a target without a template does so, from {CONTINUED} tokens (at most a quarter of --length) "
        "and from whole prompts.",
    )
    author: str | None = Field(
        None, description="Model that writes the responses: the target's fingerprint, or the name on the server."
    )
    sampling: SamplingParams = Field(
        SamplingParams(max_new_tokens=1024, seed=0),
        description="Sampling parameters of the responses. Each response gets its own seed, derived from this one.",
    )
    batch_size: Count = Field(32, description="Number of responses written at the same time.")

    def __post_init__(self) -> None:
        if self.continued is not None and self.writer == "text":
            raise UsageError(
                f'continued is {self.continued} and writer is "text", which writes nothing; use "target" or "server".'
            )

    @property
    def written_by(self) -> dict[str, Any]:
        """Manifest entry about the writer of the responses."""
        if self.writer == "text":
            return {"writer": "text"}
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        sampling = {name: getattr(self.sampling, name) for name in names}
        mode = "sampled" if self.sampling.temperature else "greedy"
        return {"writer": self.writer, "author": self.author, "mode": mode, **sampling}


@settings
class HiddenStateSettings:
    """How hidden states are computed and stored."""

    target_layers: Annotated[Count | Layers | None, Flag("--target-layers", metavar="N|LAYER,...")] = Field(
        None,
        description="Number of target layers, spread evenly (5), or a list of layers counted from 0 (1,9,17; a single "
        "one is 9,). By default 5, or fewer for a target with fewer layers.",
    )
    dtype: HiddenStateDtype = Field("bfloat16", description="Number format of the stored hidden states.")
    batch_tokens: Count = Field(
        8192,
        description="Maximum number of tokens per target forward pass, padding included; a CPU uses at most 1024. A "
        "longer document runs alone.",
    )
