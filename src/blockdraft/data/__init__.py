"""Training data: conversations or text to tokens and masks, the target's own answers, its features on disk."""
