"""Functions of serving libraries, with their names and arguments: a program changes one import.

There is a module for each library:

* ``tpu_inference``: ragged paged attention, versions 2 and 3, and the variant for heads of 64; the
  update of the cache that goes with version 2; ``sharded_ragged_paged_attention``, which MaxText
  calls. ``vllm_jax`` is another name of the module, as the project is now called vLLM JAX
* ``sglang_jax``: ragged paged attention, version 3
* ``ejkernel``: ``ragged_page_attention_v3`` and ``unified_attention``
* ``pallas_tpu``, ``pallas_gpu``: the paged attention kernels of ``jax.experimental.pallas.ops``

A function raises ValueError for an option that it does not have; what tunes another library's
kernel is accepted and ignored. docs/jax-serving.md shows the imports.
"""

from jax_frontend.compat import tpu_inference as vllm_jax

__all__ = ["vllm_jax"]
