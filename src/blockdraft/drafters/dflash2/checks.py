"""Checks of DFlash2: those of DFlash."""

from blockdraft.drafters.dflash.checks import DFlashChecker
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network


class DFlash2Checker(DFlashChecker):
    examines = DFlash2Config
    network = DFlash2Network


CHECKER = DFlash2Checker
