import pytest
from torch import nn

from blockdraft.nn.cache import cache_argument


class Old(nn.Module):
    def forward(self, hidden_states: object, past_key_values: object = None, **others: object) -> object:
        return past_key_values


class New(nn.Module):
    def forward(self, hidden_states: object, cache: object = None, **others: object) -> object:
        return cache


@pytest.mark.parametrize("module", [Old(), New()])
def test_the_cache_is_given_by_the_name_that_the_module_knows(module: nn.Module) -> None:
    assert module(1, **{cache_argument(module): "given"}) == "given"
