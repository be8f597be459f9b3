"""How each kind of drafter is trained: a module per kind, which ends in `VARIANT`."""

from blockdraft.plugins import entry_points, plugin_names

VARIANTS = "blockdraft_train.variants"  # this package, and the group of entry points of others


def variant_names() -> list[str]:
    """Return the names of the kinds of drafters that can be trained, without importing them."""
    return sorted({*plugin_names(VARIANTS), *entry_points(VARIANTS)})
