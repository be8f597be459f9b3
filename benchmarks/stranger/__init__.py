"""What somebody meets who comes with a target of their own: `make try-stranger`."""
