"""Building blocks shared by targets and drafters: layers, attention, cache."""
