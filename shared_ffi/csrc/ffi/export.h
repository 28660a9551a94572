// What libxla_paged_attention.so offers to the Python module and to compiled PyTorch programs; all
// else in it is hidden.
#pragma once

#define XLA_GPU_EXPORT __attribute__((visibility("default")))
