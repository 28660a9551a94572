"""Shared by tests, benchmarks and examples: the oracle, comparisons, layouts and HLO reading."""
