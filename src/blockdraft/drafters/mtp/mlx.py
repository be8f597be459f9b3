"""MTP heads in MLX that were trained here. Those of a target's folder have the target's layer, and run in torch."""

from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.mlx.autoregressive import MLXAutoregressive

RUNNERS = {MTPNetwork: MLXAutoregressive}
