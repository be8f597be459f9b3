"""Forwards compiled from C for CPUs, and their number of threads."""
