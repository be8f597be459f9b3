"""The commands of a fit: how they read, and which of them run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from blockdraft.cli import app
from blockdraft.errors import BlockdraftError
from blockdraft.fit import steps
from blockdraft.fit.plan import Plan
from blockdraft.fit.recipe import reference
from blockdraft.fit.steps import Step, Where, done_steps, make_steps, run_steps
from tests.fit.test_plan import TARGET, plan
