"""Training of drafters: data, recipes, objectives, losses and the trainer; `fit`, which chooses them; and `doctor`."""
