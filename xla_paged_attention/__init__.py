"""What stands on the ops: ``engine`` samples with continuous batching, in JAX and in PyTorch,
``server`` starts vLLM's server on a CPU, and ``python -m xla_paged_attention`` is the command.

The ops, in ``jax_frontend`` and ``torch_frontend``, import nothing of it.
"""

from importlib.metadata import version

__version__ = version("xla-paged-attention")
