"""`blockdraft push`: put a drafter into a repository on the hub, with a model card and code for transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blockdraft.compat.generate import write_custom_generate
from blockdraft.drafters import entries
from blockdraft.errors import UsageError, counted, describe
from blockdraft.folders import clear_remains, held
from blockdraft.formats import find_layout
from blockdraft.formats.engines import starts
from blockdraft.formats.folder import weight_files
from blockdraft.models import named_for_others
from blockdraft.tools.inspect import Report, checked_pair
from blockdraft_train.fit.steps import Where
from blockdraft_train.progress import read_log, run_folder

CARD = "README.md"
LOCAL = "DRAFTER"  # folder into which the commands of the card download the drafter


@dataclass(frozen=True)
class DrafterRecords:
    """Records of a drafter's training and measurements.

    Attributes:
        bench: Results of `blockdraft bench --out`, if any.
        log: Lines of the log of its training run.
        data: Manifest of its training data, if any.
    """

    bench: Mapping[str, Any] | None
    log: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any] | None

    @property
    def taus(self) -> list[float]:
        """tau of each evaluation in the training run."""
        return [line["tau"] for line in self.log if line.get("tau") is not None]

    def lacking(self) -> Iterator[tuple[str, str]]:
        """Yield the missing parts of the model card, each with a remedy."""
        if self.bench is None:
            yield (
                "how fast it is" if self.taus else "how many tokens are accepted",
                "add --bench DIR of `blockdraft bench --out`",
            )
        if self.data is None:
            yield "what it was trained on", "add --data DIR, the folder of its training data"


def read_drafter_records(drafter: Path, bench: Path | None = None, data: Path | None = None) -> DrafterRecords:
    """Read the records that `blockdraft fit` and `blockdraft train` leave beside a drafter.

    Args:
        bench, data: Folders with results and training data; by default those beside the drafter.

    Raises:
        UsageError: `bench` or `data` lacks its file, or a file is broken.
    """
    fitted = Where(drafter, None).folder
    return DrafterRecords(
        _json(bench or fitted / "bench", "results.json", bench is not None),
        tuple(read_log(run_folder(drafter) / "log.jsonl")),
        _json(data or fitted / "data", "data.json", data is not None),
    )


def _json(folder: Path, name: str, needed: bool) -> Mapping[str, Any] | None:
    file = folder / name
    if not file.is_file() and not needed:
        return None
    try:
        content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({describe(error)}); give the folder that holds the file.") from error
    return content


def prepare(
    drafter: str | Path,
    target: str,
    out: Path,
    repo: str | None,
    records: DrafterRecords,
    licence: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a folder that can be pushed. It appears completely or not at all.

    Args:
        drafter: Folder of a drafter.
        target: Folder, hub name or catalogue name of its target, which must fit.
        out: New or empty folder.
        repo: Name on the hub, such as "me/my-drafter", if it has one.
        records: Records for the card.
        licence: Licence for the card, as spelled on the hub.
        note: Called with each warning; see `checked_pair`.

    Raises:
        UsageError: The folder holds no drafter, the drafter does not fit the target, or `out` holds files or cannot be
            written.
    """
    if repo is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"repo must have the form OWNER/NAME, got {repo!r}.")
    report = checked_pair(drafter, target, note)
    if not Path(report.path).is_dir():
        raise UsageError(
            f"{report.path} is not the folder of a drafter; export it first: blockdraft "
            f"export {drafter} --target {target} --out DIR."
        )
    target = named_for_others(target)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} holds other files; choose a new or empty folder.")
    card, folder = model_card(report, target, repo, records, licence), Path(report.path)
    try:
        with held(out, "preparing a repository"):
            clear_remains(out)
            with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
                new = Path(scratch, "new")
                new.mkdir()
                for file in (folder / "config.json", *weight_files(folder, find_layout(report.layout).pickle)):
                    shutil.copyfile(file, new / file.name)
                (new / CARD).write_text(card, encoding="utf-8")
                write_custom_generate(new, repo)
                if out.exists():
                    out.rmdir()
                new.rename(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({describe(error)}); choose another folder.") from error


def upload(folder: Path, repo: str, private: bool) -> str:
    """Push a folder to a model repository, which is created if needed. Return its URL.

    Raises:
        UsageError: The hub refuses or cannot be reached.
    """
    hub = import_module("huggingface_hub")
    try:
        api = hub.HfApi()
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload drafter")
    except (OSError, ValueError) as error:  # raised by the hub's client and its transport
        raise UsageError(f"{repo} could not be pushed ({describe(error)}); log in with `hf auth login`.") from error
    return url


def model_card(report: Report, target: str, repo: str | None, records: DrafterRecords, licence: str | None) -> str:
    """Return README.md of the repository."""
    is_hub_name = not Path(target).exists()
    conventions = report.conventions
    head = ["---", *([f"base_model: {target}"] if is_hub_name else []), *([f"license: {licence}"] if licence else [])]
    architecture = report.about["architecture"]
    kind = next(name for name, entry in entries().items() if architecture in entry.architectures)
    head += ["library_name: blockdraft", f"tags: [speculative-decoding, {kind}, custom_generate]", "---"]
    lines = [
        *head,
        f"# A drafter for {target if is_hub_name else Path(target).name}",
        "",
        "It drafts the next tokens of its target, which then needs fewer steps for the same text: greedy responses are "
        "the target's own, token by token, and sampled responses have its distribution.",
        "",
        f"{architecture} with {counted(report.about['layers'], 'layer')} and "
        f"{report.about['parameters'] / 1e6:,.1f} M parameters, in the {report.layout} layout. It drafts up to "
        f"{counted(conventions['draft_tokens'], 'token')} at a time and reads {_read(conventions['target_layers'])}.",
        "",
        "## Measured",
        "",
        *_complete(_measured(records), "results.json", "blockdraft bench --out"),
        "",
        "## Training data",
        "",
        *_complete(_data(records), "data.json", "blockdraft data --out"),
        "",
        "## Use",
        "",
        *([] if is_hub_name else ["TARGET stands for the folder of the target.", ""]),
        *_use(report, target if is_hub_name else "TARGET", repo or "OWNER/NAME"),
    ]
    return "\n".join(lines) + "\n"


def _read(target_layers: Mapping[str, Any] | str) -> str:
    if isinstance(target_layers, str):
        return target_layers
    return f"the outputs of the target's layers {', '.join(map(str, target_layers['blockdraft']))} (from 0)"


def _complete(lines: Iterator[str], name: str, command: str) -> list[str]:
    """Return the lines. Raise a UsageError if their file was not written by this command."""
    try:
        return [*lines]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{name} was not written by `{command}` ({describe(error)}); give a folder that this command wrote."
        ) from error


def _measured(records: DrafterRecords) -> Iterator[str]:
    if records.bench is not None:
        how = records.bench["arguments"]
        yield "| | prompts | tokens/s | speed-up | tau | same responses |"
        yield "|---|---|---|---|---|---|"
        for name, one in records.bench["methods"].items():
            cells = [str(one["prompts"])]
            for key, form in (("tokens_per_second", "{:.0f}"), ("speedup", "{:.2f}"), ("tau", "{:.2f}")):
                cells.append("-" if one[key] is None else form.format(one[key]))
            cells.append("-" if one["identical"] is None else f"{100 * one['identical']:.0f} %")
            yield f"| {name} | {' | '.join(cells)} |"
        machine = records.bench["hardware"]["gpu"] or records.bench["hardware"]["cpu"]
        yield ""
        yield (
            f"Measured by `blockdraft bench`: temperature {how['temperature']:g}, responses of up to "
            f"{how['max_new_tokens']} tokens, {how['running']}, {machine}. tau: tokens per target forward pass."
        )
        return
    if records.taus:
        yield f"tau {records.taus[-1]:.2f} (tokens per target forward pass) on held-out prompts, decoded greedily."
    else:
        yield "Not measured yet; `blockdraft bench` measures it."


def _data(records: DrafterRecords) -> Iterator[str]:
    if records.data is None:
        yield "Not recorded."
        return
    counts = records.data["counts"]
    who = (records.data.get("written_by") or {}).get("writer", "")
    writer = {"target": "the target's own responses", "server": "responses of a server"}.get(who)
    sources = ", ".join(Path(str(source)).name for source in (records.data.get("arguments") or {}).get("sources") or ())
    yield (
        f"{counts['documents']:,} documents of {counts['tokens']:,} tokens, of which {counts['supervised']:,} were "
        f"trained on: {writer or 'unchanged texts'}{f', from {sources}' if sources else ''}."
    )


def _use(report: Report, target: str, repo: str) -> Iterator[str]:
    yield "With blockdraft:"
    given = ["--target", target]
    lines = starts(report.config, report.layout, repo, target, given)
    ours = starts(report.config, report.layout, LOCAL, target, given)["blockdraft"].line or ""
    yield from _block(f"hf download {repo} --local-dir {LOCAL}", ours)
    yield "With transformers, if blockdraft is installed:"
    yield from _block(
        f'model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True, max_new_tokens=256)', kind="python"
    )
    for engine, start in lines.items():
        if engine == "blockdraft":
            continue
        if start.line is not None:
            yield f"With {engine}:"
            yield from _block(start.typed)
        elif start.remedy is not None:
            yield f"With {engine} after an export, since {start.reason}:"
            yield from _block(f"hf download {repo} --local-dir {LOCAL}", start.remedy.replace(repo, LOCAL))
        else:
            yield f"Not with {engine}: {start.reason}."
            yield ""


def _block(*lines: str, kind: str = "") -> Iterator[str]:
    yield from ("", f"```{kind}", *lines, "```", "")
