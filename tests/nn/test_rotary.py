"""Scalings of rotary embeddings that are none."""

from typing import Any

import pytest

from blockdraft.errors import UsageError
from blockdraft.nn.rotary import rotary_frequencies


@pytest.mark.parametrize("scaling", [{"rope_type": "x"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": []}])
def test_scalings_that_transformers_does_not_know(scaling: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="which transformers does not accept .*; name a rope_type"):
        rotary_frequencies(8, 64, 1e4, scaling)
    assert rotary_frequencies(8, 64, 1e4, None)[0].shape == (4,)
