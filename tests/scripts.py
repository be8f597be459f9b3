"""Scripts that run as by `python -c`, in processes forked from one that has imported torch and the package: each import
takes seconds. They begin without threads and end as an interpreter does."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """
import json, os, signal, sys
import torch
import blockdraft.drafters, blockdraft.engine, blockdraft.kernels.cpu.compiled_decoder, blockdraft.targets.hf
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin:
    code, sys.argv, environment, files, seconds = json.loads(line)
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        os.environ.clear()
        os.environ.update(environment)
        for number, file in zip((1, 2), files):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_script(code: str, *arguments: object, seconds: int = 120) -> subprocess.CompletedProcess[str]:
    """Run code with arguments, and return its exit code and what it wrote. A signal ends it after so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        request = code, ["-c", *map(str, arguments)], {**os.environ}, [*map(str, files)], seconds
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(request), file=server.stdin, flush=True)
        returned = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, returned, *(file.read_text() for file in files))


@cache
def _server() -> subprocess.Popen[str]:
    """Start the process that forks. It ends with this one, whose end closes its input."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
