"""Values that are accepted, and how others are refused."""

import copy
import inspect
import pickle
import re
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
        with pytest.raises(UsageError, match=f"{name} must be"):
            SamplingParams(**{name: value})
    for value in (True, "1", None, torch.tensor(0.5), 1j):
        with pytest.raises(UsageError, match=f"{name} must be .*, got "):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert getattr(SamplingParams(**{name: np.float32(0.5)}), name) == 0.5


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "seed"])
def test_whole_numbers(name: str) -> None:
    for value in (3.5, 3.0, True, "3", NAN, torch.tensor(3)):
        with pytest.raises(UsageError, match=f"{name} must be a whole number"):
            SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{name} must be .*, got -1"):
        SamplingParams(**{name: -1})  # type: ignore[arg-type]
    assert type(getattr(SamplingParams(**{name: np.int64(3)}), name)) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number of at least 1, got None"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers, got 3"),
        ({"logit_bias": [5, 6]}, "logit_bias must map"),
        ({"logit_bias": {"5": 1}}, "keys of logit_bias must be token ids from 0 on, got '5'"),
        ({"logit_bias": {True: 1}}, "keys of logit_bias must be .*, got True"),
        ({"logit_bias": {5.0: 1}}, "keys of logit_bias must be .*, got 5.0"),
        ({"logit_bias": {-1: 1}}, "keys of logit_bias must be .*, got -1"),
        ({"logit_bias": {5: NAN}}, "logit_bias must be .*, got nan for token 5"),
        ({"logit_bias": {5: 101}}, "logit_bias must be a number between -100 and 100, got 101 for token 5"),
        ({"logit_bias": {5: "1"}}, "logit_bias must be .*, got '1' for token 5"),
        ({"logit_bias": {5: True}}, "logit_bias must be .*, got True for token 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": b"5"}, "stop_token_ids must be a list of token ids, got b'5'"),
        ({"stop_token_ids": "5"}, "entries of stop_token_ids must be .*, got '5'"),
        ({"stop_token_ids": [5, -1]}, "entries of stop_token_ids must be .*, got -1"),
        ({"stop_token_ids": [5.0]}, "entries of stop_token_ids must be .*, got 5.0"),
        ({"stop_token_ids": [True]}, "entries of stop_token_ids must be .*, got True"),
        ({"stop": 5}, "stop must be a list of texts, got 5"),
        ({"stop": ""}, "entries of stop must be .*, got ''"),
        ({"stop": ["a", ""]}, "entries of stop must be .*, got ''"),
        ({"stop": [5]}, "entries of stop must be .*, got 5"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
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
        ({"block_size": True}, r"block_size must be a whole number of at least 1 \(no drafting\) or 'auto', got True"),
        ({"block_size": 4.0}, "block_size must be .*, got 4.0"),
        ({"block_size": NAN}, "block_size must be .*, got nan"),
        ({"block_size": 0}, "block_size must be .*, got 0"),
        ({"tree_budget": "many"}, "tree_budget must be .*, got 'many'"),
        ({"tree_budget": False}, "tree_budget must be .*, got False"),
        ({"tree_budget": None}, "tree_budget must be .*, got None"),
        ({"tree_budget": -1}, "tree_budget must be .*, got -1"),
        ({"draft_window": "auto"}, "draft_window must be .* or None, got 'auto'"),
        ({"draft_window": 0}, "draft_window must be .*, got 0"),
        ({"draft_passes": 0}, "draft_passes must be .*, got 0"),
        ({"draft_passes": "auto"}, "draft_passes must be .*, got 'auto'"),
        ({"sampled": 1}, "sampled must be True or False, got 1"),
        ({"sampled": True, "tree_budget": "auto"}, "tree_budget must be a number .*, got 'auto'"),
        ({"sampled": True, "tree_budget": 3, "block_size": "auto"}, "block_size must be a number .*, got 'auto'"),
    ],
)
def test_bad_drafting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Drafting(**fields)


def test_how_far_to_draft_is_chosen_each_step_unless_something_else_is_asked_for() -> None:
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
    with pytest.raises(ValueError, match=f"{field} must be .*, got {re.escape(str(value))}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_parameters_are_copies_that_no_one_can_change() -> None:
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6], stop[0] = 2.0, "b"
    assert (params.logit_bias, params.stop) == (((5, 1.0),), ("a",))
    assert replace(params, temperature=1.0).logit_bias == params.logit_bias
    assert hash(params) == hash(SamplingParams(logit_bias={5: 1.0}, stop="a"))
