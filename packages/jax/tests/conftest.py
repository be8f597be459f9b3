"""A CPU as eight devices, before JAX is imported; and the models that the tests of targets have."""

import os
import sys
from pathlib import Path

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
sys.path.append(str(Path(__file__).parents[3] / "tests/targets"))
