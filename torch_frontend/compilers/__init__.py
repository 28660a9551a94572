"""What PyTorch's compilers need beyond an operator: ``openxla``, the backend for tensors that are
not torch_xla's, with ``in_place`` for the caches that its graphs update; and ``aot_inductor``."""
