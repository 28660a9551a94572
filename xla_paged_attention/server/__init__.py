"""vLLM's server on a CPU with this attention: ``xla-paged-attention serve``."""

PROG = "xla-paged-attention serve"
"""How messages begin."""
