"""What drafting brings by the size of the model."""
