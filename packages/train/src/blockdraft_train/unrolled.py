"""Training passes of networks that draft a token at a time: step after step, after every anchor at once.

Letters: B sequences, S tokens of one, A anchors of one, K steps, H hidden size, F = m * H.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.nn.attention import attend
from blockdraft.nn.draft_network import LayeredNetwork
from blockdraft.targets import Target
from blockdraft_train.batches import PackedSequences


def unrolled(network: LayeredNetwork, target: Target, hidden_states_BSF: Tensor, sequences: PackedSequences) -> Tensor:
    """Unroll a network of pairs with one layer over K steps from each anchor.

    All steps get the tokens of the data. The first step gets the target's hidden state of the token before the anchor,
    and each later one the network's own state of the step before it. A step attends to its document's tokens before the
    anchor, with the target's hidden states, and to the steps of its own block up to itself.

    Returns:
        States of all steps, `[B, A, K, H]`.
    """
    fused = network.fuse(hidden_states_BSF)
    begins_BS = sequences.positions_BS == 0
    before_BSH = F.pad(fused[:, :-1], (0, 0, 1, 0)).masked_fill(begins_BS.unsqueeze(-1), 0)
    embedded = target.embed(sequences.tokens_BS).float()
    keys, values = network.keys_values(embedded, before_BSH, (sequences.positions_BS - 1).clamp(min=0))
    anchors_BA = sequences.anchors_BA.clamp(min=0)
    same_BAS = sequences.documents_BS.unsqueeze(1) == sequences.documents_BS.gather(1, anchors_BA).unsqueeze(2)
    places = torch.arange(fused.size(1), device=fused.device)
    visible = same_BAS & (places < sequences.anchors_BA.unsqueeze(2)) & ~begins_BS.unsqueeze(1)
    own = torch.eye(anchors_BA.size(1), dtype=torch.bool, device=fused.device).expand(len(anchors_BA), -1, -1)

    def attention(layer: int, queries: Tensor, new_keys: Tensor, new_values: Tensor) -> Tensor:
        nonlocal keys, values, visible
        keys, values = torch.cat([keys, new_keys], dim=2), torch.cat([values, new_values], dim=2)
        visible = torch.cat([visible, own], dim=2)
        # Under autocast, norms leave queries and keys in float32.
        return attend(queries.to(values.dtype), keys.to(values.dtype), values, visible)

    hidden_state = before_BSH.gather(1, anchors_BA.unsqueeze(2).expand(-1, -1, before_BSH.size(2)))
    positions_BA = sequences.positions_BS.gather(1, anchors_BA) - 1
    states = []
    for step, tokens_BA in enumerate(sequences.tokens_BAL[:, :, :-1].unbind(dim=2)):
        positions = (positions_BA + step).clamp(min=0)
        states.append(network(target.embed(tokens_BA).float(), positions, attention, hidden_state))
        hidden_state = network.fed_on(states[-1])
    return torch.stack(states, dim=2)
