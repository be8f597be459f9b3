"""DSpark, whose checkpoints are read wrongly in the same ways as DFlash's."""

from blockdraft.drafters.dflash.checks import DFlashChecker
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork


class DSparkChecker(DFlashChecker):
    examines = DSparkConfig
    network = DSparkNetwork


CHECKER = DSparkChecker
