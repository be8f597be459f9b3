"""Training of drafters: batches and anchors, losses, variants and the trainer. Recipes put them together."""
