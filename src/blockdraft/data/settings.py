"""Settings of `blockdraft data` and `blockdraft hidden-states`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Count, Layers, settings
from blockdraft.types import SamplingParams

HiddenStateDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]

CONTINUED = 64  # default number of tokens of each text that a target without a chat template continues
LONGEST = 3072  # default length of a document, as in arXiv 2602.06036, unless the target's context is shorter
SERVER_KEY = "BLOCKDRAFT_SERVER_KEY"  # environment variable with the API key of the server that writes answers


@settings
class RecordSettings:
    """Records that are read from a dataset.

    Attributes:
        split: Split of a dataset that has several.
        subset: Subset (configuration) of a dataset that has several.
        limit: Maximum number of records, counted from the beginning over all sources; None reads all.
        text_field: Field with a plain text. Each record is then a text.
        prompt_field: Field with a prompt. Each record is then a prompt.
        response_field: Field with the response to the prompt.
    """

    split: str = "train"
    subset: str | None = None
    limit: Count | None = None
    text_field: str | None = None
    prompt_field: str | None = None
    response_field: str | None = None

    def __post_init__(self) -> None:
        if self.text_field and (self.prompt_field or self.response_field):
            raise UsageError(
                "A text field and a prompt field are named, but a record is either a text or a conversation; name only "
                "one of them."
            )


@settings
class DataSettings:
    """Way in which records become documents.

    Attributes:
        length: Maximum number of tokens of a document. Longer chats are cut, longer texts make several documents. None
            is the target's context, but at most 3072.
        template_args: Further arguments of the chat template, as a JSON object.
        split_turns: Make one document of each answer and the messages before it, instead of one of each chat. Needed
            for chat templates that render earlier turns differently once the chat goes on.
        writer: Writer of the answers: "text" keeps those of the records, "target" is our own engine, "server" a server.
        continued: Number of tokens at the beginning of each text that the target continues without a chat template,
            instead of answering chats. None does so only for a target without a template, with 64 tokens of a text (at
            most a quarter of length) and with whole prompts.
        author: Model that writes the answers: the target's fingerprint, or the model's name on the server.
        sampling: Sampling parameters of the answers; each answer gets a seed of its own, derived from the seed here.
        batch_size: Number of answers that are written at a time.
    """

    length: Annotated[int, Field(ge=2)] | None = None
    template_args: str = "{}"
    split_turns: bool = False
    writer: Literal["text", "target", "server"] = "text"
    continued: Count | None = None
    author: str | None = None
    sampling: SamplingParams = SamplingParams(max_new_tokens=1024, seed=0)
    batch_size: Count = 32

    def __post_init__(self) -> None:
        if self.continued is not None and self.writer == "text":
            raise UsageError(
                f'continued is {self.continued} and writer is "text", which writes nothing; use "target" or "server".'
            )

    @property
    def written_by(self) -> dict[str, Any]:
        """Entry of the manifest on the writer of the answers."""
        if self.writer == "text":
            return {"writer": "text"}
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        sampling = {name: getattr(self.sampling, name) for name in names}
        mode = "sampled" if self.sampling.temperature else "greedy"
        return {"writer": self.writer, "author": self.author, "mode": mode, **sampling}


@settings
class HiddenStateSettings:
    """Way in which features are computed and stored.

    Attributes:
        target_layers: Number of layers to tap (`5`), spread from layer 1 to the third from the end, or a list of
            0-based layers (`1,9,17`; a single one is `9,`). None is 5, or fewer in a target that has fewer layers.
        dtype: Type of the stored numbers.
        batch_tokens: Maximum number of tokens of one target forward, padding included; a CPU takes at most 1024, which
            suit its caches. A longer document is computed alone.
    """

    target_layers: Count | Layers | None = None
    dtype: HiddenStateDtype = "bfloat16"
    batch_tokens: Count = 8192
