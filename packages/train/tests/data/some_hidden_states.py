"""Small data of a target, and their hidden states computed by transformers."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from blockdraft.targets import Target
from blockdraft_train.data.documents import Document, TokenData, read_data
from blockdraft_train.data.token_data import tokenizer_fingerprint
from blockdraft_train.data.writer import DataWriter

TARGET_LAYERS = (2, 0)
LENGTHS = [7, 1, 12, 3, 40, 9, 9]


def made(folder: Path, target: Target, seed: int = 0) -> TokenData:
    generator = torch.Generator().manual_seed(seed)
    assert target.tokenizer is not None
    writer = DataWriter(folder, {"tokenizer": tokenizer_fingerprint(target.tokenizer)})
    writer.begin()
    for record, length in enumerate(LENGTHS):
        tokens = torch.randint(target.vocab_size, (length,), generator=generator)
        writer.add(record, [Document(tokens, tokens > 0)])
    writer.finish()
    return read_data(folder)


def alone(target: Target, data: TokenData, i: int) -> torch.Tensor:
    """Return hidden states by transformers, whose hidden state t + 1 is the output of layer t."""
    model = AutoModelForCausalLM.from_pretrained(target.path)
    states = model(data[i].tokens[None], output_hidden_states=True).hidden_states
    last = model.model.layers[2]
    outputs = []
    hook = last.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(data[i].tokens[None])
    hook.remove()
    return torch.cat([outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0], states[1]], dim=-1)[0]
