"""Verdicts of llguidance on texts under a grammar."""

import llguidance
import llguidance.hf
from transformers import PreTrainedTokenizerFast

from blockdraft.types import Grammar


def matcher_of(tokenizer: PreTrainedTokenizerFast, grammar: Grammar | None) -> llguidance.LLMatcher:
    assert grammar is not None and grammar.kind == "lark"
    compiled = llguidance.grammar_from("lark", grammar.text)
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(tokenizer), compiled)
    assert not matcher.get_error(), grammar.text
    return matcher


def accepts_text(tokenizer: PreTrainedTokenizerFast, grammar: Grammar | None, text: str) -> bool:
    """Return whether the grammar accepts the tokens of a text and may end there."""
    matcher, ids = matcher_of(tokenizer, grammar), tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())
