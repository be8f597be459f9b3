"""Three small new targets, each of another family, trained on a text.

They stand for models of users: one has a chat template, another sliding windows, and none a mask token or an unused row
of the embedding.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from blockdraft.training.optimizers import Muon

VOCABULARY = 2048
CONTEXT = 512
LENGTH, BATCH = 256, 8  # tokens of a row, and rows of a step
PASSAGE = 600  # characters of a document at least
LEARNT = 2.0  # nats a token: a drafter of a target that guesses worse has little to learn
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAMILIES = {
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 6, "head_dim": 40}
        | {"query_pre_attn_scalar": 40, "sliding_window": 64}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    ),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 48}
        | {"tie_word_embeddings": True},
    ),
}


def passages(text: str) -> list[str]:
    """Split a text into documents that begin and end with a paragraph."""
    found, held = list[str](), ""
    for paragraph in text.split("\n\n"):
        held = f"{held}\n\n{paragraph}".strip()
        if len(held) >= PASSAGE:
            found.append(held)
            held = ""
    return [*found, held] if held else found


def make_tokenizer(documents: list[str], chats: bool) -> PreTrainedTokenizerFast:
    specials = ["<|user|>", "<|assistant|>", "<|end|>"] if chats else ["<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=specials, **options)
    tokenizer.train_from_iterator(documents, trainer)
    if not chats:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ends = {"bos_token": None if chats else "<s>", "eos_token": specials[-1], "model_max_length": CONTEXT}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ends)
    if chats:
        fast.chat_template = TEMPLATE
    return fast


def make_model(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config, model, sizes = FAMILIES[name]
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made: PreTrainedModel = model(
        config(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **heads, **tokens, **sizes)
    )
    return made


def encoded(document: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A document, or where there is a template a chat of it: the user begins, the assistant goes on."""
    if tokenizer.chat_template is None:
        return [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
    words = document.split(" ")
    cut = len(words) // 4
    parts = {"user": words[:cut], "assistant": words[cut:]}
    messages = [{"role": role, "content": " ".join(part)} for role, part in parts.items()]
    return list(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])


def rows(documents: list[list[int]], seed: int) -> Iterator[list[int]]:
    """Rows that begin with a document; what a row has no room for is left away."""
    rng, row = random.Random(seed), list[int]()
    while True:
        for document in rng.sample(documents, len(documents)):
            row += document
            if len(row) > LENGTH:
                yield row[: LENGTH + 1]
                row = []


def make_target(name: str, text: str, folder: Path, steps: int) -> None:
    """Train a target for so many steps, some minutes, unless there is one."""
    if (folder / "config.json").exists():
        return
    documents = passages(text)
    tokenizer = make_tokenizer(documents, chats=name == "qwen3")
    torch.manual_seed(0)
    model = make_model(name, tokenizer).train()
    matrices, others = list[Tensor](), list[Tensor]()
    for part, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in part and "lm_head" not in part else others).append(weight)
    optimizers = [Muon(matrices, 0.02), torch.optim.AdamW(others, 3e-3, (0.9, 0.95), weight_decay=0.0)]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    stream = rows([encoded(document, tokenizer) for document in documents], seed=0)
    losses = list[float]()
    for step in range(steps):
        for group, rate in groups:  # a short rise, and a long fall
            group["lr"] = rate * min((step + 1) / 20, 1.0, 2 * (1 - step / steps))
        ids = torch.tensor([next(stream) for _ in range(BATCH)])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"{name}: step {len(losses)} of {steps}, loss {losses[-1]:.2f}", flush=True)
    last = sum(losses[-20:]) / len(losses[-20:])
    if not last < LEARNT:
        raise SystemExit(f"{name} ends with a loss of {last:.2f}; it must be under {LEARNT}. Train it for more --steps")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    tokenizer.save_pretrained(partial)
    model.eval().save_pretrained(partial)
    partial.replace(folder)
