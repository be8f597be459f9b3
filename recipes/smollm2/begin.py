"""EAGLE-3 drafter whose layer begins as the last layer of its target, for `blockdraft train eagle3 --init DIR`.

The last tap passes through `fc` unchanged into the target's last layer, final norm and head, so the drafter begins by
saying again the token that the target has just said, in states that the head understands. Training mixes in what that
token is.
"""

from __future__ import annotations

import argparse

import torch

from blockdraft import load_target
from blockdraft.data.documents import read_data
from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.drafters.eagle3.train import Eagle3Recipe, Eagle3Variant
from blockdraft.formats import Checkpoint
from blockdraft.targets import open_checkpoint
from blockdraft.targets.gguf.tensors import dense
from blockdraft.training.export import Format

TAPS = (8, 18, 28)


@torch.no_grad()
def take_last_layer(network: Eagle3Network, target: str) -> None:
    """Copy the target's last layer and final norm, and let `fc` pass on the last tap alone."""
    layer, size, last = network.midlayer, network.config.hidden_size, network.config.num_target_layers - 1
    with open_checkpoint(target, doing="read") as found:

        def weight(name: str) -> torch.Tensor:
            return dense(found.tensors[f"model.{name}.weight"].read()).float()

        network.norm.weight.copy_(weight("norm"))
        layer.hidden_norm.weight.copy_(weight(f"layers.{last}.input_layernorm"))
        layer.post_attention_layernorm.weight.copy_(weight(f"layers.{last}.post_attention_layernorm"))
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.mlp.get_submodule(name).weight.copy_(weight(f"layers.{last}.mlp.{name}"))
        layer.self_attn.o_proj.weight.copy_(weight(f"layers.{last}.self_attn.o_proj"))
        for name in ("q_proj", "k_proj", "v_proj"):
            both = layer.self_attn.get_submodule(name).weight  # columns of the embedding, then of the feature
            both[:, :size] = 0
            both[:, size:] = weight(f"layers.{last}.self_attn.{name}")
    network.fc.weight.zero_()
    network.fc.weight[:, -size:] = torch.eye(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="model of Llama's family, a folder or GGUF file")
    parser.add_argument("--data", required=True, help="token data, whose most frequent tokens can be guessed")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="how many tokens can be guessed")
    parser.add_argument("--out", required=True, help="folder of the drafter, to be written")
    args = parser.parse_args()
    target = load_target(args.target)
    variant = Eagle3Variant(Eagle3Recipe(taps=TAPS, draft_vocab=args.draft_vocab))
    network = variant.network(variant.config(target))
    variant.fit_data(network, read_data(args.data))
    variant.fit_head(network, target)
    take_last_layer(network, args.target)
    Format("eagle3").write(args.out, Checkpoint(network.config, dict(network.state_dict())))


if __name__ == "__main__":
    main()
