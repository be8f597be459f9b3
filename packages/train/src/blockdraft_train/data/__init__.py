"""Training data: conversations to token ids and masks, responses of the target, and stored hidden states."""
