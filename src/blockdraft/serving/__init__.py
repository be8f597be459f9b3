"""An OpenAI-compatible server of one target and its drafter."""
