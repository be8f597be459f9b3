"""Runner of MTP heads in MLX, of those with a layer of our own."""

from blockdraft.drafters.mtp.network import MTPNetwork
from blockdraft.mlx.autoregressive import MLXAutoregressive

RUNNERS = {MTPNetwork: MLXAutoregressive}
