"""A pair on its way to where it works: faults in how a drafter is read, other engines started with it, its folder on
the hub."""
