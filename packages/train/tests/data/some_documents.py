"""Small data folders."""

from pathlib import Path

import torch

from blockdraft_train.data.documents import Document, read_data
from blockdraft_train.data.writer import DataWriter

IDENTITY = {"tokenizer": "abc", "length": 9, "written_by": {"writer": "text"}}


def document(*ids: int, cut: bool = False) -> Document:
    tokens = torch.tensor(ids)
    return Document(tokens, tokens % 2 == 1, cut)


DOCUMENTS = {0: [document(1, 2, 3)], 1: [document(4, 5), document(6, 7, 8, 9, cut=True)], 3: [document(10, 11)]}


def write(folder: Path, order: list[list[int]]) -> DataWriter:
    """Write the records of `DOCUMENTS`, and record 2, which has no document, in this order."""
    writer = DataWriter(folder, IDENTITY)
    writer.begin(target="somewhere")
    for records in order:
        for record in records:
            writer.add(record, DOCUMENTS.get(record, []), "repetitive response" if record == 2 else None)
        writer.flush()
    return writer


def ids(folder: Path) -> list[list[int]]:
    return [document.tokens.tolist() for document in read_data(folder)]
