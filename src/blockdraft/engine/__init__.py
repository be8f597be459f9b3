"""The engine: one lossless decode loop for all drafters and targets."""

from blockdraft.decode.step_time import Costs
from blockdraft.engine.conversation import ContextFull, Conversation, PendingTurn, chat_engine
from blockdraft.engine.engine import Engine
from blockdraft.engine.infill import ExtraFile, InfillTokens, infill_params, infill_prompt
from blockdraft.engine.request import Chunk, Completion, Recorder, Request
from blockdraft.engine.stats import Stats, loops, mean_tau, merge

__all__ = [
    "Chunk",
    "Completion",
    "ContextFull",
    "Conversation",
    "Costs",
    "Engine",
    "ExtraFile",
    "InfillTokens",
    "PendingTurn",
    "Recorder",
    "Request",
    "Stats",
    "chat_engine",
    "infill_params",
    "infill_prompt",
    "loops",
    "mean_tau",
    "merge",
]
