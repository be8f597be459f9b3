"""GGUF files with random damage: each loads and runs, or is refused by a message that names it."""

import random
import struct
from pathlib import Path

import pytest
import torch
from gguf_models import MODELS, model_of, scores
from gguf_writer import write_gguf
from tiny_models import tiny_tokenizer

from blockdraft.errors import UsageError
from blockdraft.targets import load_target

TIMES = 50
NAMES = (
    "gemma4_text",
    "gemma4_text-keys",
    "gemma4_text-experts",
    "lfm2",
    "lfm2_moe",
    "qwen3",
    "gpt_oss",
    "granite",
    "phi3",
    "smollm3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
KINDS = {"per_layer": "F32", "attn_q": "Q8_0", "ffn": "Q4_0", "token": "Q5_0", "output.": "IQ4_NL"}
LAST_NORMS = (b"output_norm.weight", b"token_embd_norm.weight")  # last tensors of a header
NUMBERS = (0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32 - 1)


def whole(name: str, folder: Path) -> bytes:
    path = folder / "m.gguf"
    model = model_of(name, hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=300)
    _, metadata, extra = MODELS[name]
    write_gguf(path, model, KINDS, tiny_tokenizer(), metadata=metadata, extra=extra)
    return path.read_bytes()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the file with one random kind of damage, mostly in its header."""
    copy, header = bytearray(content), max(map(content.find, LAST_NORMS)) + 64
    match chance.choice(("cut", "bytes", "number", "long", "swap", "zeros", "double")):
        case "cut":
            return content[: chance.randrange(len(content))]
        case "bytes":
            for _ in range(chance.randint(1, 8)):
                copy[chance.randrange(header)] = chance.randrange(256)
        case "number":
            copy[(place := chance.randrange(header)) : place + 4] = struct.pack("<I", chance.choice(NUMBERS))
        case "long":
            copy[(place := chance.randrange(header)) : place + 8] = struct.pack("<Q", 2 ** chance.randrange(64))
        case "swap":
            one, two, size = (
                chance.randrange(header),
                chance.randrange(len(content)),
                chance.randint(1, 64),
            )
            copy[one : one + size], copy[two : two + size] = content[two : two + size], content[one : one + size]
        case "zeros":
            place, size = chance.randrange(len(content)), chance.randint(1, 4096)
            copy[place : place + size] = bytes(len(copy[place : place + size]))
        case "double":
            place, size = chance.randrange(header), chance.randint(1, 256)
            copy[place:place] = content[place : place + size]
    return bytes(copy)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_damage_is_reported(seed: int, name: str, tmp_path: Path) -> None:
    chance, path, refused = random.Random(seed), tmp_path / "damaged.gguf", 0
    content = whole(name, tmp_path)
    for number in range(TIMES):
        path.write_bytes(damaged(content, chance))
        try:
            with torch.no_grad():
                scores(load_target(path, device="cpu", compile="off"), torch.arange(5)[None])
        except UsageError as error:
            refused += 1
            assert "damaged.gguf" in str(error) and len(str(error)) < 1000, (number, str(error)[:2000])
    assert refused > TIMES // 4


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "m.gguf", tiny_tokenizer()
    write_gguf(path, model_of("qwen3", vocab_size=300, tie_word_embeddings=True), tokenizer=tokenizer)
    content = path.read_bytes()
    shape = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    assert content[shape : shape + 16] == struct.pack("<QQ", 32, 300)
    path.write_bytes(content[:shape] + struct.pack("<QQ", 32, 200) + content[shape + 16 :])
    with pytest.raises(UsageError, match=r"tokenizer of 300 tokens and a model of 200 \(rows of token_embd.weight\)"):
        load_target(path, device="cpu")
