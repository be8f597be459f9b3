import sys
from pathlib import Path

# For the cells, and the models that the tests of targets have.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "targets")]
