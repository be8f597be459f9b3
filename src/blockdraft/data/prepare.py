"""From rows of conversations or text to a data folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from blockdraft.data.answerers import Answerer
from blockdraft.data.documents import FORMAT, MANIFEST
from blockdraft.data.folder import check_writable, read_manifest
from blockdraft.data.reading import Reading
from blockdraft.data.regenerate import regenerate
from blockdraft.data.rows import Row
from blockdraft.data.settings import DataSettings, RowSettings
from blockdraft.data.writer import DataWriter
from blockdraft.errors import UsageError
from blockdraft.folders import held
from blockdraft.targets import Target, TargetText


class Preparation:
    """Data about to be made. The rows are read once to check them all, before anything is computed.

    Args:
        folder: Where the data go. A folder that holds part of them is gone on with; a finished one is added to where
            further rows have been put behind those that it was made of.
        target, sources, rows, settings: See `Reading`.

    Attributes:
        reading: The rows, and how they are read.
        total, missing: Rows there are, and those that are still to be worked on.

    Raises:
        ValueError: As of `Reading`; a row of no accepted form, a first row that cannot be encoded, a folder that cannot
            be written to or holds data made with other arguments or from other rows.
    """

    def __init__(
        self,
        folder: Path,
        target: Target | TargetText,
        sources: Sequence[str],
        rows: RowSettings,
        settings: DataSettings,
    ) -> None:
        self.reading = Reading(target, sources, rows, settings)
        self.settings = settings
        check_writable(folder)
        self.writer = DataWriter(folder, self.reading.identity)
        self.reading.check_first()
        manifest = self.writer.manifest or {"rows": 0, "digest": None}
        self.total, self.digest, before = self._check_rows(manifest["rows"])
        if manifest["digest"] not in (None, before):
            raise UsageError(
                f"{folder} was made from {manifest['rows']} rows, and the first {manifest['rows']} of these are others "
                f"(there are {self.total}); choose another folder for --out, or delete this one."
            )
        self.missing = self.total - len(self.writer.done)

    def run(
        self,
        answerer: Answerer | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        note: Callable[[str], None] = lambda text: None,
        **facts: Any,
    ) -> dict[str, Any]:
        """Make the data that are missing; what is made stays, also when interrupted.

        Args:
            answerer: Who writes the answers, unless they are those of the rows.
            progress: Called with the pace, and the rows done and to do in this run.
            note: Called with sentences that should stay on the screen.
            facts: Put into the manifest.

        Returns:
            The manifest.

        Raises:
            ValueError: A chat that the template refuses, a server that does not answer, a full disk, no supervised
                token in the end, another process that makes the same data.
        """
        with held(self.writer.folder, "making data"):
            if read_manifest(self.writer.folder / MANIFEST, FORMAT) != self.writer.manifest:
                raise UsageError(f"{self.writer.folder} was changed by another process meanwhile; run this again.")
            return self._run(answerer, progress, note, facts)

    def _run(
        self,
        answerer: Answerer | None,
        progress: Callable[[str, int, int], None],
        note: Callable[[str], None],
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        if not self.missing and self.writer.manifest and self.writer.manifest["finished"]:
            return self.writer.manifest
        self.writer.begin(rows=self.total, digest=self.digest, **facts)
        began, done = time.monotonic(), 0

        def tell() -> None:
            nonlocal done
            done += 1
            pace = self.writer.supervised / max(time.monotonic() - began, 1e-9)
            progress(f"{pace:.0f} tokens/s", done, self.missing)

        if self.missing:
            progress("started", 0, self.missing)
        try:
            if answerer is not None:
                tasks = ((number, self.reading.task(row)) for number, _, row in self._todo())
                length = self.reading.length
                regenerate(tasks, answerer, self.writer, self.settings.sampling, length, tell, note)
            else:
                for number, place, row in self._todo():
                    try:
                        documents = list(self.reading.documents(row))
                    except ValueError as error:
                        raise UsageError(f"{place}: {error}") from error
                    self.writer.add(number, documents, None if documents else "no supervised token")
                    tell()
        finally:
            self.writer.flush()
        return self.writer.finish()

    def _check_rows(self, known: int) -> tuple[int, str, str]:
        """Count and digest all rows; the last value is the digest of the first `known` ones."""
        digest, before, count = hashlib.sha256(), "", 0
        for place, row in self.reading.rows():
            self.reading.check(place, row)
            digest.update(json.dumps(row, sort_keys=True).encode())
            count += 1
            before = digest.hexdigest()[:16] if count == known else before
        return count, digest.hexdigest()[:16], before

    def _todo(self) -> Iterator[tuple[int, str, Row]]:
        for number, (place, row) in enumerate(self.reading.rows()):
            if number not in self.writer.done:
                yield number, place, row
