"""Parts that all benchmarks share: command lines, records, processes, turns and ratios, tables and pictures."""
