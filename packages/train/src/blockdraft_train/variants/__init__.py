"""How each kind of drafter is trained: a module per kind, which ends in `VARIANT`."""
