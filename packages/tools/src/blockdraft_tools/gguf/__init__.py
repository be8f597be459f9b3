"""Writers of GGUF files: any, and those of drafters, of targets and of their tokenizers."""
