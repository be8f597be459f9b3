"""Values that are accepted, and how others are refused."""

import copy
import inspect
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

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
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_numbers(name: str) -> None:
    for value in (NAN, np.float32(NAN), float("inf"), -3.0):
        with pytest.raises(UsageError, match=f"{name} is .*must be"):
            SamplingParams(**{name: value})
    for value in (True, "1", None, torch.tensor(0.5), 1j):
        with pytest.raises(UsageError, match=f"{name} is .*; it must be a number"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert getattr(SamplingParams(**{name: np.float32(0.5)}), name) == 0.5


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "seed"])
def test_whole_numbers(name: str) -> None:
    for value in (3.5, 3.0, True, "3", NAN, torch.tensor(3)):
        with pytest.raises(UsageError, match=f"{name} is .*; it must be a whole number"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{name} is -1"):
        SamplingParams(**{name: -1})  # type: ignore[arg-type]
    assert type(getattr(SamplingParams(**{name: np.int64(3)}), name)) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"logit_bias": 3}, "logit_bias is 3; it must map"),
        ({"logit_bias": [5, 6]}, "logit_bias is .*; it must map"),
        ({"logit_bias": {"5": 1}}, "names the token '5'"),
        ({"logit_bias": {True: 1}}, "names the token True"),
        ({"logit_bias": {5.0: 1}}, "names the token 5.0"),
        ({"logit_bias": {-1: 1}}, "names the token -1"),
        ({"logit_bias": {5: NAN}}, "logit_bias is nan for token 5"),
        ({"logit_bias": {5: 101}}, "logit_bias is 101 for token 5"),
        ({"logit_bias": {5: "1"}}, "logit_bias for token 5 is '1'"),
        ({"logit_bias": {5: True}}, "logit_bias for token 5 is True"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; give a list"),
        ({"stop_token_ids": "5"}, "stop_token_ids holds '5'"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids holds -1"),
        ({"stop_token_ids": [5.0]}, "stop_token_ids holds 5.0"),
        ({"stop_token_ids": [True]}, "stop_token_ids holds True"),
        ({"stop": 5}, "stop is 5; give a list"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": [5]}, "stop holds 5"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**fields)


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
        ({"block_size": True}, "block_size is True; it must be a whole number or 'auto'"),
        ({"block_size": 4.0}, "block_size is 4.0"),
        ({"block_size": NAN}, "block_size is nan"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"tree_budget": "many"}, "tree_budget is 'many'"),
        ({"tree_budget": False}, "tree_budget is False"),
        ({"tree_budget": None}, "tree_budget is None"),
        ({"tree_budget": -1}, "tree_budget is -1"),
        ({"draft_window": "auto"}, "draft_window is 'auto'; it must be a whole number or None"),
        ({"draft_window": 0}, "draft_window is 0"),
        ({"draft_passes": 0}, r"draft_passes is 0; it must be at least 1 \(all draft tokens from one pass"),
        ({"draft_passes": "auto"}, "draft_passes is 'auto'; it must be a whole number or None"),
        ({"sampled": 1}, "sampled is 1; it must be True or False"),
        ({"sampled": True, "tree_budget": "auto"}, "tree_budget must be a number .*, got 'auto'"),
        ({"sampled": True, "tree_budget": 3, "block_size": "auto"}, "block_size must be a number .*, got 'auto'"),
    ],
)
def test_bad_drafting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Drafting(**fields)


def test_how_far_to_draft_is_chosen_each_cycle_unless_something_else_is_asked_for() -> None:
    assert Drafting().block_size == Drafting(draft_window=9).block_size == "auto"
    assert Drafting(None).block_size is None  # whole blocks
    assert Drafting(tree_budget=4).block_size is Drafting(tree_budget="auto").block_size is None
    assert Drafting(sampled=True).block_size is None
    assert Drafting(3).block_size == 3


def test_a_changed_drafting_has_the_defaults_of_what_it_is_now() -> None:
    assert replace(Drafting(), sampled=True, tree_budget=4) == Drafting(sampled=True, tree_budget=4)
    assert replace(Drafting(), tree_budget=8).block_size is None
    assert replace(Drafting("auto"), tree_budget=8).block_size == "auto"  # which was asked for
    copied = pickle.loads(pickle.dumps(copy.deepcopy(Drafting())))
    assert copied == Drafting() and replace(copied, tree_budget=8).block_size is None
    assert inspect.signature(Drafting).parameters["block_size"].default == "auto"


def test_good_drafting() -> None:
    assert Drafting("auto", "auto") == Drafting(block_size="auto", tree_budget="auto")
    assert type(Drafting(np.int64(4)).block_size) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1e-46),  # which float32 makes 0 of
        ("temperature", 1e-46),
        ("temperature", float("inf")),
        ("repetition_penalty", 1e-46),
        ("top_p", 1.1),
        ("max_new_tokens", 0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "names the token -1"),
        ({"logit_bias": {"5": 1.0}}, "names the token '5'"),
        ({"logit_bias": {5: 101.0}}, "is 101.0 for token 5"),
        ({"logit_bias": {5: float("nan")}}, "is nan for token 5"),
        ({"stop": ""}, "stop holds ''"),
        ({"stop": ["a", ""]}, "stop holds ''"),
        ({"stop": [7]}, "stop holds 7"),
    ],
)
def test_bad_biases_and_stops_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_parameters_are_copies_that_no_one_can_change() -> None:
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6], stop[0] = 2.0, "b"
    assert (params.logit_bias, params.stop) == (((5, 1.0),), ("a",))
    assert replace(params, temperature=1.0).logit_bias == params.logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}, stop="a"))
