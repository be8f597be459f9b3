"""On-disk formats of drafters, in and out."""
