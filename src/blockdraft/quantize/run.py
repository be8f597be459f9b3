"""Former place of `blockdraft.tools.quantize.run`."""

from blockdraft.tools.quantize.run import Perplexity, Quantized, quantize
from blockdraft.tools.quantize.settings import QuantizeSettings

__all__ = ["Perplexity", "Quantized", "QuantizeSettings", "quantize"]
