"""What tests, benchmarks and examples share: the oracle, comparison, and reading of programs."""
