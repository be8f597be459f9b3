"""Parsers of tool calls and reasoning in answers, and grammars that force tool calls or JSON."""

from blockdraft.serving.parsing.answer import AnswerParser, parser_of
from blockdraft.serving.parsing.grammar import grammar_of
from blockdraft.serving.parsing.template import takes_several_calls

__all__ = ["AnswerParser", "grammar_of", "parser_of", "takes_several_calls"]
