"""`blockdraft doctor`: find out why the target rejects a drafter's tokens."""
