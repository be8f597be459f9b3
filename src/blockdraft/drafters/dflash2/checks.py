"""DFlash2, whose checkpoints are read wrongly in the same ways as DFlash's."""

from blockdraft.drafters.dflash.checks import DFlashBench
from blockdraft.drafters.dflash2.network import DFlash2Config, DFlash2Network


class DFlash2Bench(DFlashBench):
    examines = DFlash2Config
    network = DFlash2Network


BENCH = DFlash2Bench
