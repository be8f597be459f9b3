"""A server of one target and its drafter, with the APIs of OpenAI and Anthropic."""
