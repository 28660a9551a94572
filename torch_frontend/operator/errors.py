"""The words of what PyTorch's operators refuse. ``shared_ffi._native.TorchRules`` raises some."""

from __future__ import annotations

from shared_ffi import spec, varlen_attention, varlen_attention_backward
from shared_ffi.spec import value_error


def missing_error(op: str, name: str) -> TypeError:
    """For an argument that must be a tensor, and is None."""
    error = spec.missing_error(op, name)
    if name == "kv_cache":
        error.args = (f"{error}. kv_cache_update writes in place and returns None",)
    return error


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
    return value_error(op, "out", "share no memory with an argument", f"memory of {name}")


def one_memory_error(op: str, name: str, other: str) -> ValueError:
    """For a tensor to write to that is another argument as well."""
    rule = f"not share memory with {other}: it is written in place"
    return value_error(op, name, rule, f"the memory of {other}")


def inference_tensor_error(op: str, name: str) -> RuntimeError:
    """For an inference tensor that is written to outside of inference mode."""
    return RuntimeError(
        f"{op}: {name} must be a normal tensor outside of torch.inference_mode(); got an inference "
        "tensor. Call it in inference mode, or clone() the tensor outside of it"
    )


def devices_error(op: str, name: str, device: object, first: str, other: object) -> ValueError:
    """For tensors on several devices."""
    return ValueError(
        f"{op}: all tensors must be on one device; got {name} on {device} beside {first} on {other}"
    )
