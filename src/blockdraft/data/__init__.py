"""Training data: records become tokens and masks, with the target's responses and hidden states on disk."""
