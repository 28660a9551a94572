"""The checked call of an op, and the wording of errors about its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec, get_args, get_type_hints

import numpy as np

Parameters = ParamSpec("Parameters")

STORAGE_DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
"""The dtypes that a cache may have instead. An element of uint8 holds two numbers of 4 bits."""

INTEGER_DTYPES = ("int8", "uint8")
"""K may have one of these and V the other."""

GROUP_SCALE_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
"""The dtypes of scales that have a dimension of groups."""

NO_OVERLAP = "have no overlapping elements: it is written in place"
"""The rule for an array that is written in place."""

MAX_INT64 = np.iinfo(np.int64).max

Scalar = np.float32 | np.int64
"""The value of an attribute. An int64 computed from symbolic sizes is a symbol, too."""


class Extremes(NamedTuple):
    """How the smaller and the larger of two sizes are found, which may be symbols."""

    smaller: Callable[[int, int], int] = min
    larger: Callable[[int, int], int] = max
    are_quick: bool = True
    """Whether it takes no time to compare sizes that are extremes themselves."""


NUMBERS = Extremes()
"""For sizes that are all numbers."""


"""Returns the smaller of two sizes, which may be symbols."""


class ArraySpec(NamedTuple):
    """Shape and dtype of an operand or a result. XLA, NumPy and PyTorch share the dtypes' names."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    """In elements; None: contiguous in row-major order."""


@dataclass(frozen=True)
class Call:
    """A call that has passed its op's check, with all that a backend needs to make it.

    Two calls are equal exactly when they lower to the same custom call.
    """

    op: str
    """The public function, whose name is in messages."""
    target: str
    """Custom-call target, the same on every platform."""
    check: Callable[..., Call]
    """The op's check, which has made this call."""
    names: tuple[str, ...]
    """The operands' names, which are those of the check's arguments."""
    operands: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]
    attributes: tuple[tuple[str, Scalar], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    """Pairs (operand, result) that share a buffer, because the op writes in place."""
    num_shared_heads: int = 0
    """How many heads devices can share: num_kv_heads, or num_heads if there is one kv head. 0: the
    call cannot be split by heads."""
    head_dims: tuple[int | None, ...] = ()
    """The dimension of heads of each operand, then of each result; None: every device has all of
    it. A device that computes a part of the heads has that part of each of these dimensions."""
    summed: tuple[int, ...] = ()
    """The results that are sums over heads without a dimension of heads: a device that computes a
    part of the heads has a part of each sum."""
    cuda_scratch_bytes: Callable[[Call, Extremes], int] | None = None
    """Computes the size of the CUDA kernels' scratch; None: they need none."""
    options: tuple[tuple[str, Any], ...] = ()
    """The check's arguments that are no arrays and differ from their default, which
    `records_options` adds. However the caller spelled a number, it is the same float, int or bool.
    """

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in self.options)})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: caches look a call up each time that it is made."""
        return hash((self.target, self.operands, self.results, self.attributes))

    def on(self, specs: Sequence[ArraySpec]) -> Call:
        """The checked call with these options on arrays of other shapes and dtypes."""
        return self.check(**dict(zip(self.names, specs, strict=True)), **dict(self.options))

    def arguments_as_text(self) -> str:
        """The names of the arrays, and the options, as Python literals: equal arguments have equal
        text in every process."""
        return str((self.names, dict(self.options)))

    def arrays(self) -> list[tuple[ArraySpec, int | None]]:
        """Lists operands, then results, each with its dimension of heads."""
        return [*zip((*self.operands, *self.results), self.head_dims, strict=True)]

    def results_on(self, platform: str, extremes: Extremes = NUMBERS) -> tuple[ArraySpec, ...]:
        """Lists what the handler of a platform ("cpu", "cuda") writes: the results and, on CUDA,
        the scratch, because handlers allocate nothing there."""
        if platform != "cuda" or self.cuda_scratch_bytes is None:
            return self.results
        return (*self.results, ArraySpec((self.cuda_scratch_bytes(self, extremes),), "uint8"))


def records_options(check: Callable[Parameters, Call]) -> Callable[Parameters, Call]:
    """Decorator: lets an op's check return calls that know their options."""
    parameters = inspect.signature(check).parameters
    defaults = {name: x.default for name, x in parameters.items()}
    kinds = {name: _kind(hint) for name, hint in get_type_hints(check).items()}

    @wraps(check)
    def recorded(*positional: Parameters.args, **keywords: Parameters.kwargs) -> Call:
        call = check(*positional, **keywords)
        given = dict(zip(defaults, positional, strict=False)) | keywords
        options = [
            (name, _canonical(given[name], kinds[name]))
            for name in defaults
            if name in given and name not in call.names
        ]
        options = [(name, value) for name, value in options if value is not defaults[name]]
        return replace(call, options=tuple(options))

    return recorded


def _kind(hint: Any) -> type | None:
    """The type of an option, from its annotation in a check; None: it is an array."""
    return next((x for x in (bool, float, int, str) if x in (hint, *get_args(hint))), None)


def _canonical(value: Any, kind: type | None) -> Any:
    """The one spelling of an option that a check has accepted. Caches compare calls, and 1, 1.0,
    True and NumPy's numbers are equal: the first of them would be the text of all later programs.
    """
    if value is None or kind is None or is_symbol(value):
        return value
    if kind is float:
        return float32_of(value).item()
    return min(int(value), MAX_INT64) if kind is int else kind(value)


def float32_of(value: float) -> np.float32:
    """A number as an attribute. There is one zero: -0.0 == 0.0, but they are two programs."""
    with np.errstate(over="ignore"):
        try:
            return np.float32(value) + np.float32(0)
        except OverflowError:  # an integer beyond float64
            return np.float32(np.inf if value > 0 else -np.inf)


def float_attribute(op: str, argument: str, value: float) -> np.float32:
    """A number of Python or NumPy as an attribute; raises TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise dtype_error(op, argument, "type float", type(value).__name__)
    return float32_of(value)


def flag(op: str, argument: str, value: bool | np.bool_) -> bool:
    """A bool of Python or NumPy, as Python's; raises TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise dtype_error(op, argument, "type bool", type(value).__name__)
    return bool(value)


class Operands:
    """The operands and attributes that a check has collected so far."""

    def __init__(self, attributes: list[tuple[str, Scalar]]) -> None:
        self.names: list[str] = []
        self.specs: list[ArraySpec] = []
        self.head_dims: list[int | None] = []
        self.attributes = attributes

    def add(self, name: str, spec: ArraySpec, head_dim: int | None = None) -> None:
        """Adds an operand that each call has."""
        self.names.append(name)
        self.specs.append(spec)
        self.head_dims.append(head_dim)

    def add_feature(self, name: str, spec: ArraySpec, head_dim: int | None) -> None:
        """Adds an operand, and an attribute of the same name that holds the operand's number."""
        self.attributes.append((name, np.int64(len(self.specs))))
        self.add(name, spec, head_dim)


def numbers_of(dtype: str) -> int:
    """The numbers in an element of a cache of this dtype."""
    return 2 if dtype == "uint8" else 1


def holds(condition: Any) -> bool:
    """Whether a condition holds that a call needs. PyTorch checks it when the program runs, if it
    does not know the sizes before."""
    return condition.node.expect_true(__file__, 0) if is_symbol(condition) else bool(condition)


def has_shape(array: ArraySpec, shape: Sequence[int]) -> bool:
    """Whether an array has the shape that a call needs."""
    return len(array.shape) == len(shape) and all(
        holds(size == wanted) for size, wanted in zip(array.shape, shape, strict=True)
    )


def check_array(
    op: str,
    argument: str,
    array: ArraySpec,
    sizes: Sequence[tuple[str, int] | int],
    dtypes: str,
    remedy: str,
) -> None:
    """Raises ValueError (shape) or TypeError (dtype) if an array is not what a call needs.

    Args:
        sizes: of each dimension; in messages with its name, if it has one.
        dtypes: such as ``int32 or int64``.
        remedy: for a wrong shape.
    """
    named = [size if isinstance(size, tuple) else ("", size) for size in sizes]
    if not has_shape(array, [size for _, size in named]):
        rule = ", ".join(f"{name}={size}" if name else str(size) for name, size in named)
        raise shape_error(op, argument, f"[{rule}]", array.shape, remedy)
    if array.dtype not in dtypes.split(" or "):
        raise dtype_error(op, argument, f"dtype {dtypes}", array.dtype)


def is_symbol(value: Any) -> bool:
    """Whether a number or a condition is a symbol of PyTorch, torch.SymInt or torch.SymBool."""
    return hasattr(value, "node")


def shape_error(op: str, argument: str, rule: str, got: object, remedy: str) -> ValueError:
    """The error for an argument of the wrong shape."""
    return value_error(op, argument, f"have shape {rule}", got, remedy)


def value_error(op: str, argument: str, rule: str, got: object, remedy: str) -> ValueError:
    """The error for an argument of the wrong value. `remedy`: a sentence, without its period."""
    return ValueError(f"{op}: {argument} must {rule}; got {_show(got)}. {remedy}")


def excess_error(op: str, argument: str, rule: str, got: object) -> ValueError:
    """The error for an argument that the call may not have. `rule`: such as ``be None with
    tree_mask``."""
    if hasattr(got, "shape"):
        got = f"shape {[*got.shape]}"
    return value_error(op, argument, rule, got, f"Leave {argument} out")


def dtype_error(op: str, argument: str, rule: str, got: object, remedy: str = "") -> TypeError:
    """The error for an argument of the wrong dtype or type. `remedy`: where they do not tell it."""
    remedy = _cure(argument, rule, got) or remedy or f"Pass {rule}"
    return TypeError(f"{op}: {argument} must have {rule}; got {_show(got)}. {remedy}")


def _cure(argument: str, rule: str, got: object) -> str:
    """What to write instead, where a type or dtype tells it."""
    what, _, wanted = rule.partition(" ")
    if what == "type" and str(got).endswith("Tracer"):  # JAX's name of a value under jit
        return (
            f"{argument} is a constant of the program: name it in static_argnames of jax.jit, or "
            "bind it with functools.partial"
        )
    if (argument, got) == ("scale", "NoneType"):
        return "Give it: it is usually head_size ** -0.5"
    if rule in _EXAMPLES:
        if got in _NUMBERS and rule != "type str":
            return f"Pass {wanted}({argument})"
        more = ", or an array with one for each sequence" if argument == "causal" else ""
        example = "a string, such as 'kv'" if argument == "hadamard" else _EXAMPLES[rule]
        return f"Pass {example}{more}"
    if argument == "num_seqs" and got in ("float", "float32"):
        return "It may be scale, if an array before it was left out"
    if (rule, got) == ("dtype int32", "int64"):
        return f"Pass {argument}.int()"
    if what != "dtype" and not what.endswith("'s"):
        return ""
    if argument in _WRITTEN:  # a copy would lose what is written
        return f"Make {argument} with that dtype"
    return f"Cast {argument} to {'one of them' if ' or ' in rule else wanted.split()[-1]}"


_EXAMPLES = {
    "type float": "a number",
    "type int": "a whole number",
    "type bool": "True or False",
    "type str": "a string, such as 'n2bhd'",
}
_WRITTEN = ("kv_cache", "value_cache", "k_scale_cache", "v_scale_cache", "out")
_NUMBERS = ("ArrayImpl", "Tensor", "ndarray", "float", "float32", "float64", "int", "int64")


def number(value: Any) -> Any:
    """The number that an array of floats without dimensions holds, if it is known. Anything else as
    it is, for the check: a value under ``jax.jit``, or one whose derivative somebody wants.
    """
    is_float = getattr(value, "shape", None) == () and "float" in str(getattr(value, "dtype", ""))
    is_traced = type(value).__name__.endswith("Tracer") or getattr(value, "requires_grad", False)
    return float(value) if is_float and not is_traced else value


def on_host(array: Any) -> np.ndarray:
    """Copies an array of NumPy, JAX or PyTorch to the host, if it is not there; waits for it."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def integers_on_host(op: str, argument: str, given: Any) -> np.ndarray:
    """Copies an array of integers of any width, or a list of them, to the host.

    Raises:
        TypeError: it is None, holds something else, or its rows have several lengths.
    """
    if given is None:
        raise missing_error(op, argument)
    try:
        array = on_host(given)
    except ValueError:  # in NumPy's words, which name neither op nor argument
        raise array_error(op, argument, "rows of several lengths", "Pad them to one") from None
    # NumPy makes floats of an empty list, and objects of what int64 cannot hold.
    if array.dtype.kind not in "iu" and not all(type(x) is int for x in array.flat):
        raise dtype_error(op, argument, "integers", array.dtype)
    return array


def check_is_on_host(op: str, **arrays: Any) -> None:
    """Raises TypeError for a value under ``jax.jit``, which no host has."""
    for argument, array in arrays.items():
        entries = [array, *array] if isinstance(array, list | tuple) else [array]
        if any(type(x).__name__.endswith("Tracer") for x in entries):
            raise TypeError(
                f"{op}: {argument} must have values on the host; got a value under jax.jit. Call "
                f"{op} outside of the jitted function, and give it the result"
            )


def missing_error(op: str, argument: str, remedy: str = "") -> TypeError:
    """The error for an argument that must be an array, and is None."""
    remedy = remedy or f"It is not optional{'; pad_batch makes it' * (argument in _OF_A_BATCH)}"
    return array_error(op, argument, "None", remedy)


_OF_A_BATCH = ("slot_mapping", "context_lens", "block_tables", "query_start_loc", "num_seqs")


def array_error(op: str, argument: str, got: str, remedy: str) -> TypeError:
    """The error for an argument that is no array."""
    return TypeError(f"{op}: {argument} must be an array; got {got}. {remedy}")


def _show(got: object) -> str:
    if isinstance(got, int) and got.bit_length() > 1024:  # more digits than anybody reads
        return f"an integer of {got.bit_length()} bits"
    return str(list(got)) if isinstance(got, tuple) else str(got)
