"""Training of drafters: anchors, block mask and loss. Recipes put them together."""
