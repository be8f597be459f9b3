"""Flow maps as drafters: DFlash whose passes move noise to the embeddings of tokens."""
