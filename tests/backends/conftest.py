import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "targets"))  # for the models that the tests of targets have
