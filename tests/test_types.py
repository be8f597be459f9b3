"""Values that are accepted, and how others are refused."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from blockdraft.errors import UsageError
from blockdraft.types import Drafting, SamplingParams

NAN = float("nan")


def test_the_order_of_the_settings_stays() -> None:
    """They may be given by position."""
    assert " ".join(field.name for field in fields(SamplingParams)) == (
        "max_new_tokens temperature top_k top_p min_p logit_bias repetition_penalty presence_penalty frequency_penalty "
        "seed stop_token_ids stop ignore_eos logprobs prompt_logprobs grammar prediction lookup_scope"
    )
    known = "block_size tree_budget sampled draft_window draft_passes"
    assert " ".join(field.name for field in fields(Drafting)) == known


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or between 1e-30 and 1e30, got -0.1"),
        ({"temperature": 1e-46}, "temperature must be .*, got 1e-46"),
        ({"temperature": NAN}, "temperature must be a finite number, got nan"),
        ({"temperature": np.float32(NAN)}, "temperature must be a finite number, got nan"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_p": 0.0}, "top_p must be at least 1e-30, got 0.0"),
        ({"top_p": 1.1}, "top_p must be at most 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be at least 0"),
        ({"min_p": 1.1}, "min_p must be at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be at least 1e-30"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number"),
        ({"presence_penalty": 2.1}, "presence_penalty must be at most 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be at least -2"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number, got None"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 3.0}, "max_new_tokens must be a whole number, got 3.0"),
        ({"max_new_tokens": "3"}, "max_new_tokens must be a whole number, got '3'"),
        ({"top_k": True}, "top_k must be a whole number, got True"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
        ({"logit_bias": 3}, "logit_bias must be a table or a list, got 3"),
        ({"logit_bias": [5, 6]}, r"logit_bias\[0\] must be a list, got 5"),
        ({"logit_bias": {"5": 1}}, r"logit_bias\[0\]\[0\] must be a whole number, got '5'"),
        ({"logit_bias": {-1: 1}}, r"logit_bias\[0\]\[0\] must be at least 0, got -1"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[0\]\[1\] must be at most 100, got 101"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"stop_token_ids": "5"}, "stop_token_ids must be a list, got '5'"),
        ({"stop_token_ids": [5, -1]}, r"stop_token_ids\[1\] must be at least 0, got -1"),
        ({"stop_token_ids": [True]}, r"stop_token_ids\[0\] must be a whole number, got True"),
        ({"stop": 5}, "stop must be a list or a text, got 5"),
        ({"stop": ["a", ""]}, r"stop\[1\] must be a text that is not empty, got ''"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**fields)


def test_numbers_of_numpy_become_those_of_python() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (type(params.max_new_tokens), type(params.temperature)) == (int, float)


@pytest.mark.parametrize("ids", [[4, 5], (4, 5), range(4, 6), np.array([4, 5]), iter([4, 5])])
def test_stop_tokens_are_kept_as_a_tuple(ids: Any) -> None:
    kept = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert kept == (4, 5) and type(kept) is tuple and {type(token) for token in kept} == {int}


def test_biases_are_kept_as_pairs() -> None:
    assert SamplingParams(logit_bias={np.int64(5): 1.5}).logit_bias == ((5, 1.5),)
    assert SamplingParams(logit_bias=[(5, 1.5), (6, 2)]).logit_bias == ((5, 1.5), (6, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": True}, "block_size must be a whole number or 'auto', got True"),
        ({"block_size": 0}, "block_size must be at least 1 or 'auto', got 0"),
        ({"tree_budget": "many"}, "tree_budget must be .*, got 'many'"),
        ({"tree_budget": None}, "tree_budget must be .*, got None"),
        ({"tree_budget": -1}, "tree_budget must be .*, got -1"),
        ({"draft_window": "auto"}, "draft_window must be a whole number, got 'auto'"),
        ({"draft_passes": 0}, "draft_passes must be at least 1, got 0"),
        ({"sampled": 1}, "sampled must be true or false, got 1"),
        ({"sampled": True, "tree_budget": "auto"}, "tree_budget must be a number .*, got 'auto'"),
    ],
)
def test_bad_drafting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Drafting(**fields)


def test_chains_are_adaptive_by_default() -> None:
    assert Drafting().automatic and Drafting(sampled=True).automatic and Drafting(None, "auto").automatic
    assert not any(fixed.automatic for fixed in (Drafting(None), Drafting(3), Drafting(tree_budget=4)))


def test_good_drafting() -> None:
    assert Drafting("auto", "auto") == Drafting(block_size="auto", tree_budget="auto")
    assert type(Drafting(np.int64(4)).block_size) is int  # type: ignore[arg-type]


def test_parameters_are_copies_that_no_one_can_change() -> None:
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6], stop[0] = 2.0, "b"
    assert (params.logit_bias, params.stop) == (((5, 1.0),), ("a",))
    assert replace(params, temperature=1.0).logit_bias == params.logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}, stop="a"))
