"""The operators ``torch.ops.xla_gpu``: what all of them share.

``define``: an operator's kernels, made of its schema and its op's check. ``arguments``: from a call
of PyTorch to that check. ``eager``: the kernel for tensors on the CPU and CUDA. ``xla``: the one for
torch_xla's tensors. ``dtensor``: the rule for DTensors. ``errors``: the words of what they refuse.
"""
