"""How training data and features are made: the settings of `blockdraft data` and `blockdraft features`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Count, Layers, settings
from blockdraft.types import SamplingParams

FeatureDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]

CONTINUED = 64  # tokens of each text, where a target without a chat template goes on with texts
LONGEST = 3072  # the paper's sequences (arXiv 2602.06036), where the target's context is not shorter
SERVER_KEY = "BLOCKDRAFT_SERVER_KEY"  # environment variable with the key for servers that are asked


@settings
class RowSettings:
    """What of a dataset is read.

    Attributes:
        split: Split of a dataset that has several.
        subset: Subset (configuration) of a dataset that has several.
        limit: Rows that are read, from the beginning, over all sources; None reads all.
        text_field: Field that holds a plain text, which is then what each row is taken for.
        prompt_field: Field that holds the prompt, which is then what each row is taken for.
        response_field: Field that holds the response to it.
    """

    split: str = "train"
    subset: str | None = None
    limit: Count | None = None
    text_field: str | None = None
    prompt_field: str | None = None
    response_field: str | None = None

    def __post_init__(self) -> None:
        if self.text_field and (self.prompt_field or self.response_field):
            raise UsageError("A text field and a prompt field are named; a row is either a text or a conversation.")


@settings
class DataSettings:
    """How documents are made of rows.

    Attributes:
        length: Tokens of a document at most. Longer chats are cut, longer texts make several documents; None is the
            target's context, but at most 3072.
        template_args: Further arguments of the chat template, as a JSON object.
        split_turns: Make a document of each answer with what comes before it, instead of one of each chat. For chat
            templates that render earlier turns in another way, which they are otherwise refused for.
        writer: Who writes the answers: "text" keeps those of the rows; "target" is our own engine, "server" a server.
        continued: Have the target continue the first N tokens of each text, without a chat template, instead of
            answering chats. None does so only for a target that has no template: 64 tokens of a text, a quarter of
            length at most, and prompts as a whole.
        author: What answers then: the target's fingerprint, or the model's name on the server.
        sampling: How; its seed makes one for each answer.
        batch_size: Answers that are written at a time.
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
            raise UsageError(f"continued is {self.continued} and nobody is to write; choose a writer.")

    @property
    def written_by(self) -> dict[str, Any]:
        """Who wrote the answers, for the manifest."""
        if self.writer == "text":
            return {"writer": "text"}
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
        sampling = {name: getattr(self.sampling, name) for name in names}
        mode = "sampled" if self.sampling.temperature else "greedy"
        return {"writer": self.writer, "author": self.author, "mode": mode, **sampling}


@settings
class FeatureSettings:
    """How features are computed and kept.

    Attributes:
        taps: How many layers to tap (`5`), spread from layer 1 to the third from the end, or which, from 0 on
            (`1,9,17`; one alone is `9,`). None is 5, or fewer in a target that has fewer layers.
        dtype: Of the kept numbers.
        batch_tokens: Tokens of one target forward at most, padding included; a longer document goes alone.
    """

    taps: Count | Layers | None = None
    dtype: FeatureDtype = "bfloat16"
    batch_tokens: Count = 8192
