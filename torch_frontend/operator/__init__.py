"""The operators ``torch.ops.xla_gpu``: what all of them share.

``define``: an operator's kernels, made of its schema and its op's check. ``arguments``: from a call
to that check. ``eager``: the kernel for tensors on the CPU and CUDA. ``xla``: the kernel for
torch_xla's tensors, for the platform that ``export`` says. ``dtensor``: the rule for DTensors.
``errors``: the words of what they refuse.
"""
