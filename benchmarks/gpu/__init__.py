"""Tests and benchmarks on an NVIDIA GPU, beside its limits and other libraries."""
