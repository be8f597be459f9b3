"""Shared parts of the benchmarks: command lines, records, processes, interleaved runs, tables and pictures."""
