"""Checkpoints rounded to few bits, in the layout of compressed-tensors, which other engines read, too."""

from blockdraft.quantize.run import Perplexity, Quantized, quantize
from blockdraft.quantize.settings import CalibrationSettings, QuantizeSettings
from blockdraft.quantize.text import Text, read_text

__all__ = ["CalibrationSettings", "Perplexity", "QuantizeSettings", "Quantized", "Text", "quantize", "read_text"]
