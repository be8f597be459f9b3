"""OpenAI's APIs: chat completions, completions and responses, and the routes beside them."""
