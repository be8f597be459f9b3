"""`blockdraft fit` on targets that it has not seen: `make try-stranger`."""
