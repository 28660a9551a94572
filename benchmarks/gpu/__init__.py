"""What the kernels do on an NVIDIA GPU, beside its limits and its other libraries."""
