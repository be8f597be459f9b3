"""What the docs tell readers to type works, word for word.

Every `blockdraft` command of the docs, be it in a block or in a sentence, is parsed by the command line. Those in
blocks, and the Python blocks, are run as well, page by page, in a folder that holds what they name: hub names are
folders there. What is not run stands in `NOT_RUN`, with the reason.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import blockdraft
from blockdraft import cli
from blockdraft.serving.metrics import PREFIX, Metrics
from blockdraft.serving.openai.chat import ChatRequest
from blockdraft.settings import from_text
from blockdraft.types import Drafting
from blockdraft_bench.methods import parse_methods
from blockdraft_bench.settings import MeasureSettings
from blockdraft_diffusion.settings import DiffusionRecipe
from blockdraft_train.settings_files import read_settings
from blockdraft_train.variant import find_variant

ROOT = Path(__file__).parents[1]
PAIR = Path(blockdraft.__file__).parent / "pair/tiny"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/*.md",
        "recipes/*/README.md",
        "benchmarks/**/README.md",
        "packages/*/README.md",
    )
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which tells of the past
)

# Commands and Python blocks (by their first line) that are parsed and not run, and why.
INSIDE = "an excerpt of the engine, with its names"
PROCESSES = "starts several processes of accelerate; packages/train/tests/test_devices.py does that"
SERVER = "needs a running server; tests/cli/test_bench_server.py has one"
SERVE = "serves until it is stopped; tests/serving/test_run.py does that"
FIT = "takes hours; packages/train/tests/fit/test_run.py runs the steps"
PULLS = "downloads a model; tests/models/test_pull.py has an index of its own"
PULLED = "needs SmolLM2; tests/models runs it"
GPU = "needs a GPU and a model of the hub"
NOT_RUN = {
    "blockdraft pull smollm2": PULLS,
    "blockdraft pull qwen2.5-coder-1.5b": PULLS,
    "blockdraft demo": PULLS,
    "blockdraft inspect my-drafter --target Qwen/Qwen3-0.6B": "needs the hub; docs/doctor.md has one that runs",
    "blockdraft bench server http://localhost:8000 --prompts prompts.jsonl": "needs a running server",
    "blockdraft quantize Qwen/Qwen3-0.6B --out qwen3-4bit --calibrate notes.txt": "needs the hub",
    "blockdraft export my-drafter --target Qwen/Qwen3-0.6B --format gguf --out for-llama-cpp": "needs the hub",
    'blockdraft generate --backend jax "Tom has 3 boxes."': "needs JAX; packages/jax/tests decodes with it",
    'blockdraft generate --backend mlx "Tom has 3 boxes."': "needs mlx-lm; packages/mlx/tests decodes with it",
    'blockdraft generate --target Qwen/Qwen3-0.6B --backend jax "Hello"': "needs JAX and the hub",
    "blockdraft chat --target mlx-community/Qwen3-4B-4bit": "needs mlx-lm and the hub",
    "blockdraft fit --target Qwen/Qwen3-0.6B --out my-drafter": FIT,
    "blockdraft diffusion convert Qwen/Qwen3-0.6B-Base --out my-diffusion-model": "needs the hub",
    "blockdraft chat --target smollm2": PULLED,
    "blockdraft chat --target qwen2.5-coder-1.5b": PULLED,
    "blockdraft chat --target Qwen3-8B-Q4_K_M.gguf --drafter z-lab/Qwen3-8B-DFlash-b16": "needs a file and the hub; "
    "tests/drafters/test_draft_lm.py has such a drafter",
    "blockdraft chat --target Qwen3.5-9B-Q4_K_M.gguf --drafter mtp": "needs a file; "
    "tests/drafters/mtp/test_gguf_head.py has such",
    "blockdraft hidden-states --data build/dense/data --target $TARGET --target-layers 7,16,26,28 --out "
    "build/hidden-states": PULLED,
    "blockdraft train eagle3 $RECIPE/drafter.toml --target $TARGET --data build/dense/data      "
    "--hidden-states build/hidden-states --out build/drafter": PULLED,
    "blockdraft train eagle3 $RECIPE/drafter.toml --target $TARGET --data build/dense-2/data      --hidden-states "
    "build/dense-2/hidden-states --init build/drafter-6 --alone 0 --batch 2 --epochs 1      --learning-rate 5e-4 "
    "--muon-learning-rate 0.012 --qat-bits 4 --out build/drafter-7": PULLED,
    "blockdraft hidden-states --data build/code-files/data --target $TARGET --target-layers 7,16,26,28      "
    "--out build/code-files/hidden-states": PULLED,
    "blockdraft train eagle3 $RECIPE/drafter.toml --target $TARGET --data build/recorded/data      "
    "--hidden-states build/recorded/hidden-states --init build/drafter-7 --alone 0 --batch 2 --epochs 1      "
    "--schedule linear --learning-rate 5e-4 --muon-learning-rate 0.012 --qat-bits 4 --out build/drafter": PULLED,
    "blockdraft hidden-states --data build/half/data --target $HALF --target-layers 6,14,22,24 --out "
    "build/half/hidden-states": PULLED,
    "blockdraft train eagle3 $RECIPE/drafter.toml --target $HALF --data build/half/data      --hidden-states "
    "build/half/hidden-states --target-layers 6,14,22 --batch 2 --epochs 1 --out build/half-1": PULLED,
    "blockdraft train eagle3 $RECIPE/drafter.toml --target $HALF --data build/half/data      --hidden-states "
    "build/half/hidden-states --init build/half-1 --alone 0 --batch 2 --steps 110 --schedule linear      "
    "--learning-rate 7e-4 --muon-learning-rate 0.015 --qat-bits 4 --seed 1 --out build/half-2": PULLED,
    "blockdraft export build/drafter --target $TARGET --format gguf --type q4_0 --no-tokenizer "
    "--out build/bundle": PULLED,
    "blockdraft chat --target model.gguf": "needs a GGUF file; tests/targets/test_gguf.py has such",
    "blockdraft serve --target smollm2": SERVE,
    'blockdraft generate --target smollm2 "Write a Python function that adds two numbers." --compare': PULLED,
    "blockdraft serve --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16": SERVE,
    "from blockdraft import Engine, load_drafter, load_target": "needs SmolLM2, or a model of the hub",
    "blockdraft fit --target MODEL --data prompts.jsonl --hours 1 --out drafter --dry-run": FIT,
    "blockdraft fit --target MODEL --data prompts.jsonl --hours 2 --out drafter": FIT,
    "blockdraft fit --target MODEL --init DRAFTER --data traffic --minutes 30 --out mine": FIT,
    'blockdraft generate --target MODEL --drafter drafter "..."': FIT,
    'blockdraft generate --target MODEL --drafter DRAFTER --compare "..."': FIT,
    'blockdraft generate --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --compare "What is 17 '
    'plus 25?"': GPU,
    'blockdraft generate --target DIR --drafter mtp --block-size 4 "..."': "the target that stands in has no MTP head; "
    "tests/drafters/mtp/test_target_network.py has such",
    "blockdraft serve": SERVE,
    "blockdraft serve --target qwen2.5-coder-1.5b --port 8012 --temperature 0": SERVE,
    "blockdraft serve --target qwen2.5-coder-1.5b --port 11434": SERVE,
    "import ollama": "needs a running server; tests/clients has one",
    "blockdraft serve --target MODEL --drafter DRAFTER --port 8001 --served-model-name my-model": SERVE,
    "blockdraft serve --self-check 8": SERVE,
    "blockdraft serve --no-stored-prefixes": SERVE,
    "blockdraft serve --record traffic --record-hidden-states": SERVE,
    "blockdraft serve --host 0.0.0.0 --allow-host box.local": SERVE,
    "blockdraft bench server http://localhost:8000 --prompts gsm8k.jsonl --concurrency 1,8,64 --temperature 0,1 --out "
    "results": SERVER,
    "blockdraft bench server http://localhost:8000 --against http://localhost:8001 --prompts gsm8k.jsonl": SERVER,
    "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig": PULLED,
    "blockdraft export bundled --target smollm2 --out smollm2-drafter": PULLED,
    "blockdraft inspect smollm2-drafter --target smollm2-dense": PULLED,
    "import openvino_genai as ov": "tests/engines/test_openvino.py runs that engine",
    "blockdraft serve --target TARGET --drafter DRAFTER": SERVE,
    "output = base_model.generate(": "writes into the cache of transformers; tests/compat/test_generate.py has its own",
    "blockdraft doctor --target MODEL --drafter DRAFTER --prompts chats.jsonl": "takes half a minute; "
    "packages/train/tests/doctor/test_doctor.py examines the same pair",
    "blockdraft hidden-states --data build/experiments/data --target $HALF --target-layers 6,14,22,24 "
    "--out build/experiments/hidden-states": "reads what the script before it writes",
    "from openai import OpenAI": "needs a running server; tests/clients has one",
    "proposal = drafter.propose(state, anchor, plan)": INSIDE,
    "blockdraft train dflash recipe.toml --target DIR --data DIR --out DIR --layers 3 --learning-rate 1e-3 "
    "--target-layers 1,9,17": "names layers that the target that stands in, of 8 layers, does not have",
    "accelerate launch --multi_gpu --num_processes 8 -m blockdraft train dflash recipe.toml --target DIR --data DIR "
    "--out DIR": PROCESSES,
    "accelerate launch --use_fsdp --num_processes 8 -m blockdraft train ...": PROCESSES,
    "accelerate launch --multi_gpu --num_processes 2 -m blockdraft train dflash recipe.toml --target DIR --data DIR "
    "--out DIR --device cpu": PROCESSES,
    "accelerate launch --multi_gpu -m blockdraft diffusion train ...": PROCESSES,
}
# Appended where the command is run: a handful of prompts instead of a corpus, and a run of seconds instead of hours.
SMALL = {
    "data": "--max-new-tokens 48",
    "quantize": "--length 16 --tokens 128 --held-out 32",
    "diffusion train": "--steps 2 --length 32 --batch 2",
    "diffusion generate": "--max-new-tokens 6",
    "diffusion perplexity": "--length 32 --draws 4",
    "bench": "--limit 1 --repeats 1 --max-new-tokens 16",
    "train": "--steps 2 --length 64 --anchors 4 --batch 2 --held-out 2 --eval-prompts 1 --eval-tokens 8 --layers 1 "
    "--target-layers 2 --intermediate-size 32",
}
CHATS = [
    "Tom has 3 boxes of 12 pens. He gives away 5 pens. How many are left?",
    *(f"Ann has {n} apples and buys {n + 3} more. How many apples does she have now?" for n in range(4, 16)),
]


class Command(NamedTuple):
    page: str
    text: str  # as it stands there, without comment
    in_block: bool

    @property
    def arguments(self) -> list[str]:
        """Behind the word blockdraft; dots that stand for more are left out."""
        words = shlex.split(self.text)
        return [word for word in words[words.index("blockdraft") + 1 :] if word != "..." or '"..."' in self.text]


class Block(NamedTuple):
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(*parts) for parts in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


def commands_of_block(page: str, block: Block) -> Iterator[Command]:
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):  # the others are output
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        line = re.sub(r"\s+#.*", "", line).strip()
        if block.language != "python" and re.match(r"(accelerate launch .* -m )?blockdraft ", line):
            yield Command(page, line, in_block=True)


def commands_of(page: str) -> list[Command]:
    commands = [command for block in blocks_of(page) for command in commands_of_block(page, block)]
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:accelerate launch [^`]*?)?blockdraft\s+[a-z-][^`]*)`", text)
    return commands + [Command(page, " ".join(command.split()), in_block=False) for command in inline]


COMMANDS = [command for page in PAGES for command in commands_of(page)]


@cache
def command_line() -> Any:
    """Making it takes as long as looking at several commands."""
    return typer.main.get_command(cli.app)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one(page: str) -> None:
    for command in commands_of(page):
        check(command)


def check(command: Command) -> None:
    """Fail unless `parse` takes the command."""
    try:
        parse(command)
    except (Exception, typer.Exit) as error:
        raise AssertionError(f"{command.text} is no command ({error})") from error


def parse(command: Command) -> None:
    """Command, options and values are known to the command line. A sentence may leave out what is needed."""
    arguments = command.arguments
    group = command_line()
    if arguments[0].startswith("-"):
        assert arguments[0] in ["--help", *(option for parameter in group.params for option in parameter.opts)]
        return
    arguments = [argument for argument in arguments if not re.fullmatch(r"\[[A-Z]+\]|[A-Z]+\.\.\.", argument)]
    context = typer.Context(group, info_name="blockdraft")
    found, rest = group, arguments
    while rest and hasattr(found, "resolve_command"):
        name, found, rest = found.resolve_command(context, rest)
        if hasattr(found, "resolve_command"):
            context = typer.Context(found, parent=context, info_name=name)
    if "--help" in rest or hasattr(found, "resolve_command"):
        return
    required = [parameter for parameter in found.params if parameter.required]
    for parameter in required:  # what a sentence leaves out, and placeholders
        if not command.in_block or parameter.param_type_name == "argument":
            parameter.required = False
    try:
        context = found.make_context(name, rest, parent=context)
    finally:
        for parameter in required:
            parameter.required = True
    given = context.params
    for option in ("block_size", "tree_budget"):
        if given.get(option) is not None and hasattr(Drafting, option):
            from_text(Drafting, option, given[option])
    if isinstance(given.get("methods"), str):
        parse_methods(given["methods"], None, None, MeasureSettings.tree_budget)
    if context.obj:  # the fields of a recipe
        kind = find_variant(given["variant"] or "dflash").recipe_class if "variant" in given else DiffusionRecipe
        read_settings(kind, None, context.obj)


def test_exceptions_are_in_the_docs() -> None:
    lines = {line for page in PAGES for block in blocks_of(page) for line in block.text.splitlines()}
    known = {command.text for command in COMMANDS} | lines
    assert [text for text in NOT_RUN if text not in known] == []


def prose_of(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(ROOT / page)):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        known = anchors_of(path) if anchor and path.suffix == ".md" and path.exists() else {anchor}
        if not link.startswith(("http://", "https://")) and not (path.exists() and anchor in known):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)", prose_of(ROOT / "docs/README.md"))) == set()


@pytest.mark.parametrize("page", PAGES)
def test_named_files_are_there(page: str) -> None:
    """Paths below the folders of this repository or of the package; names without a folder may be of any file."""
    places = (ROOT, ROOT / "src/blockdraft", (ROOT / page).parent)
    folders = {path.name for place in places[:2] for path in place.iterdir() if path.is_dir()} - {"build", "data"}
    named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|h|sh|toml|md|txt|jinja))`", prose_of(ROOT / page))
    ours = [name for name in named if name.split("/")[0] in folders]
    assert [name for name in ours if not any((place / name).exists() for place in places)] == []


def test_bodies_are_requests() -> None:
    """The server takes the JSON blocks, and knows each of their fields."""
    blocks = [json.loads(block.text) for block in blocks_of("docs/serve.md") if block.language == "json"]
    assert len(blocks) == 3
    for body in blocks:
        read = ChatRequest(**body).model_dump(by_alias=True, exclude_unset=True)
        assert read == body


def test_metrics_are_documented() -> None:
    """Each of the server's metrics stands in the docs, and nothing else does."""
    gauges = ("num_requests_running", "num_requests_waiting", "num_prefill_tokens_left", "drafting_on")
    families = list(Metrics({name: ("", lambda: 0.0) for name in gauges}).registry.collect())
    known = {family.name.removeprefix(PREFIX) + "_total" * (family.type == "counter") for family in families}
    section = (ROOT / "docs/serve.md").read_text(encoding="utf-8").split("## Metrics")[1].split("\n## ")[0]
    first_cells = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)(?:\{\w+\})?`", first_cells)) == known


def test_the_page_has_the_settings_of_the_docs() -> None:
    """Every key of a program's settings in the docs is in the block that the server's page offers."""
    page = (ROOT / "src/blockdraft/serving/web/editors.js").read_text(encoding="utf-8")
    blocks = [block for block in blocks_of("docs/editors.md") if block.language in ("json", "yaml", "toml")]
    keys = {key for block in blocks for key in re.findall(r"([a-z][\w-]{3,})\"?\s*[:=](?!//)", block.text)}
    assert {"prompt_format", "wire_api", "apiBase"} <= keys
    assert [key for key in sorted(keys) if key not in page] == []


def copied(folder: Path, place: Path) -> None:
    """Copy a folder as links to its files, which no command changes."""
    shutil.copytree(folder, place, copy_function=os.symlink)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_accelerator: None, own_cache: Path) -> Path:
    """A working folder with what the docs name: the bundled pair as models, and some chats."""
    for name in ("Qwen/Qwen3-8B", "TARGET"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copied(PAIR / "target", tmp_path / name)
    base = tmp_path / "openai-community/gpt2"  # one without a chat template
    copied(PAIR / "target", base)
    (base / "chat_template.jinja").unlink()
    (tmp_path / "book.txt").write_text("\n\n".join(CHATS))
    for name in ("checkpoints/Qwen3-8B-DFlash-b16", "DRAFTER"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copied(PAIR / "drafter", tmp_path / name)
    lines = "".join(json.dumps({"turns": [text]}) + "\n" for text in CHATS)
    for name in ("chats.jsonl", "gsm8k.jsonl", "humaneval.jsonl"):
        (tmp_path / name).write_text(lines)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in CHATS))
    answered = "".join(json.dumps({"prompt": text, "response": f"{text} So it is."}) + "\n" for text in CHATS)
    (tmp_path / "responses.jsonl").write_text(answered)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled_in(command: Command, number: int) -> list[str]:
    """Arguments with DIR replaced by the folder that it stands for."""
    stands_for = {"--target": "TARGET", "--data": "data", "--out": f"out{number}", "--drafter": "DRAFTER"}
    arguments = command.arguments
    for at, argument in enumerate(arguments):
        if argument == "DIR":
            arguments[at] = stands_for[arguments[at - 1]]
    small = SMALL.get(arguments[0]) or SMALL.get(" ".join(arguments[:2]), "")
    return arguments + small.split() * ("--show-recipe" not in arguments)


def runnable(page: str) -> list[tuple[Block, list[Command]]]:
    found = []
    for block in blocks_of(page):
        commands = [command for command in commands_of_block(page, block) if command.text not in NOT_RUN]
        is_python = block.language == "python" and block.text.splitlines()[0] not in NOT_RUN
        if commands or is_python:
            found.append((block, commands))
    return found


def names_of_examples(text: str) -> dict[str, Any]:
    """Return what the Python blocks of this text take for granted."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    inputs = tokenizer(CHATS[0], return_tensors="pt")
    names = {"tokenizer": tokenizer, "inputs": inputs, "input_ids": inputs["input_ids"]}
    if "base_model" in text:
        names["base_model"] = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32")
    return names


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the libraries that examples use as they come
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_blocks_run(
    page: str, folder: Path, standard_input: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a page in order, Python blocks in one namespace, with the names that they take for granted."""
    python = [block.text for block, _ in runnable(page) if block.language == "python"]
    names = names_of_examples("".join(python)) if python else {}
    for number, (block, commands) in enumerate(runnable(page)):
        if block.language == "python":
            exec(compile(block.text, page, "exec"), names)
        for place, command in enumerate(commands):
            standard_input("How much is 3 * 12?\n")
            with pytest.raises(SystemExit) as exit_info:
                cli.main(filled_in(command, 10 * number + place))
            assert not exit_info.value.code, f"{command.text}: {capsys.readouterr().err}"
