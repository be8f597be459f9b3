"""Tool calls and reasoning out of the text of answers, and grammars that make a model call a tool."""

from blockdraft.serving.parsing.answer import AnswerParser, parser_of
from blockdraft.serving.parsing.grammar import grammar_of

__all__ = ["AnswerParser", "grammar_of", "parser_of"]
