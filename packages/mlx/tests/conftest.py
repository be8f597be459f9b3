import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests/targets"))  # for the models that the tests of targets have
