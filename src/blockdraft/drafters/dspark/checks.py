"""Checks of DSpark: those of DFlash."""

from blockdraft.drafters.dflash.checks import DFlashChecker
from blockdraft.drafters.dspark.network import DSparkConfig, DSparkNetwork


class DSparkChecker(DFlashChecker):
    examines = DSparkConfig
    network = DSparkNetwork


CHECKER = DSparkChecker
