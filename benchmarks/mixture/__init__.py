"""Mixtures of experts and hybrids beside llama.cpp."""
