"""Runner of EAGLE-3's network in MLX."""

from blockdraft.drafters.eagle3.network import Eagle3Network
from blockdraft.mlx.autoregressive import MLXAutoregressive

RUNNERS = {Eagle3Network: MLXAutoregressive}
