"""What recipes check beyond the types of their fields."""

from dataclasses import fields

import pytest

from blockdraft_train.recipe import Recipe
from blockdraft_train.settings_files import describe
from blockdraft_train.variant import find_variant
from blockdraft_train.variants import variant_names


def test_fields_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="not all 0"):
        Recipe(objective={"decay": 0.0})
    with pytest.raises(ValueError, match="batch must be a multiple of accumulation, 4.*, got 6"):
        Recipe(batch=6, accumulation=4)
    with pytest.raises(ValueError, match="not all 0.*batch must be .*got 6"):
        Recipe(objective={"decay": 0.0}, batch=6, accumulation=4)


@pytest.mark.parametrize("name", variant_names())
def test_every_field_of_every_variant_is_explained(name: str) -> None:
    kind = find_variant(name).recipe_class
    assert all(describe(kind, field.name) for field in fields(kind))
