"""Other calculators beside radar, on published speeds: `python -m benchmarks.radar.others --help`.

Asks `whichllm` (PyPI), by a Python that has it, and `llm-checker` (npm), by node, what they expect of the devices and
models of `published.toml` that decode one text plainly. Written: others.json beside it, which the page of docs shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Parser
from benchmarks.harness.report import write_files
from benchmarks.radar.published import Measured, published
from blockdraft.models import known
from blockdraft.radar.devices import find
from blockdraft.radar.step import BITS

FOLDER = Path(__file__).parent
FILE = FOLDER / "others.json"
ASK = FOLDER / "others"
QUANTS = {"bf16": "F16", "mxfp4": "MXFP4"}  # as whichllm spells kinds of weights; llama.cpp's are spelled alike
# Cards that did not hold Llama 2 70B, by the same source as most of the speeds.
TOO_SMALL = (
    ("RTX 4080", "Q4_0"),
    ("RTX 3090", "Q4_0"),
    ("RTX 4090", "Q4_0"),
    ("RTX A6000", "bf16"),
    ("RTX 6000 Ada", "bf16"),
    ("A100 SXM 80GB", "bf16"),
    ("H100 PCIe", "bf16"),
)


def compared() -> Iterator[Measured]:
    """Published speeds of one text that is decoded plainly, on devices that such calculators know."""
    for measured in published():
        if measured.plain and measured.batch == 1 and measured.kind not in ("tpu", "cpu"):
            yield measured


def questions() -> list[dict[str, Any]]:
    """What each calculator is asked, in the order of `compared` and `TOO_SMALL`."""
    asked = [(row.device, row.model, row.weights, row.context) for row in compared()]
    asked += [(device, "llama-3.3-70b", weights, 512) for device, weights in TOO_SMALL]
    return [_question(*each) for each in asked]


def _question(device: str, name: str, weights: str, context: int) -> dict[str, Any]:
    model, card = known(name), find(device)
    parameters = model.parameters or 0
    return {
        "device": card.name.split(" 40-core")[0].split(" SXM")[0],
        "apple": card.kind == "apple",
        "memory_gb": card.memory_gb,
        "hub": model.hub,
        "family": model.family or "",
        "parameters": parameters,
        "active": model.active_parameters,
        "longest": model.context,
        "quant": QUANTS.get(weights, weights),
        "bytes": int(parameters * BITS[weights] / 8),
        "context": context,
    }


def ask(command: Sequence[str], asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A calculator's answers, one a question.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, prog="python -m benchmarks.radar.others")
    parser.add_argument("--whichllm", required=True, metavar="PYTHON", help="a Python that has whichllm")
    parser.add_argument("--llm-checker", required=True, metavar="DIR", help="folder in which npm installed llm-checker")
    options = parser.parse_args(arguments)
    asked = questions()
    answers = {
        "whichllm": ask([options.whichllm, str(ASK / "ask_whichllm.py")], asked),
        "llm-checker": ask(["node", str(ASK / "ask_llm_checker.js"), options.llm_checker], asked),
    }
    for name, found in answers.items():
        if len(found) != len(asked):
            parser.error(f"{name} answered {len(found)} of {len(asked)} questions")
    version = [options.whichllm, "-c", "import importlib.metadata as m; print(m.version('whichllm'))"]
    package = Path(options.llm_checker) / "node_modules" / "llm-checker" / "package.json"
    versions = {
        "whichllm": subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip(),
        "llm-checker": json.loads(package.read_text(encoding="utf-8"))["version"],
    }
    print(f"Written: {write_files(FOLDER, {FILE.name: {'versions': versions, 'answers': answers}})[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
