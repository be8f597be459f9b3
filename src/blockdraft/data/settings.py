"""Which records are read from a dataset."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from blockdraft.errors import UsageError
from blockdraft.settings import Count, Flag, settings


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
