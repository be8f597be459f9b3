"""Tool calls and reasoning: the formats of models, parsers of their output, and grammars that force calls or JSON."""

from blockdraft.serving.tool_calls.grammar import grammar_of
from blockdraft.serving.tool_calls.harmony import HarmonyParser
from blockdraft.serving.tool_calls.parser import OutputParser, parser_of

__all__ = ["HarmonyParser", "OutputParser", "grammar_of", "parser_of"]
