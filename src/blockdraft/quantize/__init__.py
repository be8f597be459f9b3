"""Former place of `blockdraft.tools.quantize`."""
