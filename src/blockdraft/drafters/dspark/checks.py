"""DSpark, whose checkpoints are read wrongly in the same ways as DFlash's."""

from blockdraft.drafters.dflash.checks import DFlashBench
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork


class DSparkBench(DFlashBench):
    examines = DSparkConfig
    network = DSparkNetwork


BENCH = DSparkBench
