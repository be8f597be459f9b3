"""How far to draft: the policy, what it estimates from past steps, and the step costs that are stored on disk."""
