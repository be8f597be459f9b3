"""Training of drafters: recipes, batches, objectives, losses and the trainer. Each drafter's folder has its variant."""
