"""The words of what PyTorch's operators refuse. ``shared_ffi._native.TorchRules`` raises some."""

from __future__ import annotations

import torch

from shared_ffi import spec, varlen_attention, varlen_attention_backward
from shared_ffi.paged_attention import METADATA, TOKEN_PAIRS
from shared_ffi.spec import value_error


def missing_error(op: str, name: str) -> TypeError:
    """For an argument that must be a tensor, and is None."""
    of_cache = "kv_cache_update writes in place and returns None"
    return spec.missing_error(op, name, of_cache if name == "kv_cache" else "")


def tensor_error(op: str, name: str, given: object) -> TypeError:
    """For an argument that must be a tensor, and is something else."""
    remedy = "Pass a tensor"
    if hasattr(given, "__dlpack__"):  # of NumPy or JAX
        remedy = f"Pass torch.from_dlpack({name})"
    elif name == "kv_cache" and isinstance(given, list | tuple):
        remedy = "K and V as two tensors are kv_cache and value_cache"
    elif isinstance(given, list | tuple) and any(isinstance(x, torch.Tensor) for x in given):
        remedy = "Join its tensors to one, with torch.cat"
    elif isinstance(given, list | tuple | int | float):
        dtype = "int32" if name in _INTEGERS else "float32"
        remedy = f"Pass torch.tensor({name}, dtype=torch.{dtype})"
    return spec.dtype_error(op, name, "type torch.Tensor", type(given).__name__, remedy)


_INTEGERS = (*METADATA, *TOKEN_PAIRS, "slot_mapping", "positions")
"""The arguments that hold integers."""


def derivative_error(op: str, what: str) -> NotImplementedError:
    """For an operand that has a derivative."""
    if op in (varlen_attention.OP, varlen_attention_backward.OP):
        return NotImplementedError(
            f"{op}: only torch.autograd differentiates it, in reverse mode; got an operand that "
            f"{what}. Call backward() or torch.autograd.grad() outside of torch.func and forward_ad"
        )
    return NotImplementedError(
        f"{op}: inference only, it has no derivative; got an operand that {what}. "
        "Call it under torch.no_grad() or torch.inference_mode(), or detach() the operand; "
        "to train, call varlen_attention"
    )


def overlap_error(op: str, name: str) -> ValueError:
    """For `out` that shares memory with an argument."""
    rule, got = "share no memory with an argument", f"memory of {name}"
    return value_error(op, "out", rule, got, "Make another tensor for the result")


def one_memory_error(op: str, name: str, other: str) -> ValueError:
    """For a tensor to write to that is another argument as well."""
    rule = f"not share memory with {other}: it is written in place"
    return value_error(op, name, rule, f"the memory of {other}", "Clone one of them")


def inference_tensor_error(op: str, name: str) -> RuntimeError:
    """For an inference tensor that is written to outside of inference mode."""
    return RuntimeError(
        f"{op}: {name} must be a normal tensor outside of torch.inference_mode(); got an inference "
        "tensor. Call it in inference mode, or clone() the tensor outside of it"
    )


def devices_error(op: str, name: str, device: object, first: str, other: object) -> ValueError:
    """For tensors on several devices."""
    return ValueError(
        f"{op}: all tensors must be on one device; got {name} on {device} beside {first} on "
        f"{other}. Move one with to(device)"
    )
