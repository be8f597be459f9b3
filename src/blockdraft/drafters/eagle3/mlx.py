"""EAGLE-3 in MLX."""

from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.mlx.autoregressive import MLXAutoregressive

RUNNERS = {Eagle3Network: MLXAutoregressive}
