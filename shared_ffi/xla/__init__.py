"""All that knows XLA: how a call becomes HLO, and which runtimes have the handlers.

``lowering``: the custom call in JAX's programs. ``programs``: whole programs for other frameworks.
``partitioning``: a custom call split by heads. ``runtimes``: registration, with torch_xla by
``elf`` and with CUDA plugins by ``pjrt``.
"""
