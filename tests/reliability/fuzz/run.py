"""Runs trials on the CPU handlers, with every instruction set and several threads, in the backends, and
on the CUDA handlers of the emulated GPU."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness import reference
from harness.arrays import guarded, shared_with_torch, unpacked
from harness.compare import Oracle, assert_same_bits
from shared_ffi import _native, kv_cache_update, paged_attention, varlen_attention_backward
from shared_ffi.spec import Call
from tests.cases import varlen
from tests.reliability.fuzz.trials import Trial
from tests.support import gpu, varlen_calls
from tests.support.calls import (
    checked_call,
    cpu_instruction_set,
    eager_call,
    in_place,
    numbers,
    overload_of,
    results_of,
    rows_in,
    specs,
    split_keywords,
    with_wider_rows,
)

THREADS = (2, 3, 8)
_LARGEST_SCALE = 100.0  # with larger ones, logits may exceed float32
_MOST_TRAINED_ROWS = 600  # of a call's queries on the emulated GPU: more take seconds


class Failure(AssertionError):
    """A promise that does not hold."""

    def __init__(self, promise: str, why: object) -> None:
        super().__init__(f"{promise}: {why}")
        self.promise = promise


class Outcome:
    """Results of a call, or the message of its error."""

    def __init__(self, call: Callable[[], Any], errors: tuple[type[Exception], ...]) -> None:
        self.results: tuple[np.ndarray, ...] = ()
        self.error: str | None = None
        try:
            results = call()
        except errors as error:
            self.error = str(error) or type(error).__name__
        else:
            self.results = results if isinstance(results, tuple) else (results,)


class Expected:
    """What a legal call gives, by the oracle. It is computed on first need."""

    def __init__(self, op: str, inputs: Any, attributes: dict[str, Any]) -> None:
        self._op = op
        self._arguments = inputs, attributes
        self._oracle: Any = None

    def compare(self, results: tuple[np.ndarray, ...]) -> None:
        """Raises AssertionError if the results are not those of the oracle."""
        inputs, attributes = self._arguments
        if self._op == "varlen_attention":
            _compare_with_float64(inputs, attributes, results)
            return
        if self._op == "paged_attention":
            self._oracle = self._oracle or Oracle(inputs, attributes)
            self._oracle.assert_close_on_cpu(results if len(results) > 1 else results[0])
            return
        if self._oracle is None:
            updated = reference.kv_cache_update(*inputs, **attributes)
            self._oracle = updated if isinstance(updated, tuple) else (updated,)
        assert_same_bits(results, self._oracle)


def _compare_with_float64(inputs: Any, attributes: dict[str, Any], results: Any) -> None:
    """Raises AssertionError unless an output and its gradients are those of float64."""
    used = {name: x for name, x in attributes.items() if x is not None}
    output, expected = varlen.oracle(inputs._asdict() | used, _dout(inputs))
    names = [name for name in varlen.DIFFERENTIABLE if name in inputs._asdict() | used]
    wanted = [output, *map(expected.__getitem__, names)]
    dtype = inputs.query.dtype.name
    # Outputs that gradients come from are rounded, too, and on some CPUs so are weights.
    tolerance = varlen_calls.TOLERANCES[dtype] * (1 if dtype == "float32" else 2)
    for name, x, want in zip(["output", *names], results, wanted, strict=True):
        error = np.abs(x.astype(np.float64) - want).max(initial=0)
        largest = max(1, np.abs(want).max(initial=0))
        assert error <= tolerance * largest, f"{name} by {error} of {largest}"


def _dout(inputs: Any) -> np.ndarray:
    """The derivative of a loss with respect to the output."""
    shape = (*inputs.query.shape[:2], inputs.value.shape[2])
    return np.random.default_rng(1).normal(size=shape).astype(inputs.query.dtype)


class CpuRunner:
    """Runs trials on the CPU."""

    def __init__(self, backends: Iterable[str] = ("eager",), sets: Sequence[str] = ()) -> None:
        """`sets`: instruction sets, all if none is named."""
        self._backends = {name: BACKENDS[name]() for name in backends}
        self._sets = [*(sets or _native.cpu_instruction_sets())]
        self.calls: Counter[str] = Counter()

    def run(self, trial: Trial) -> None:
        """Raises Failure if a promise does not hold."""
        inputs, attributes = trial.arguments()
        call = self._checked(trial, inputs, attributes)
        if call is None:
            self.calls["trials that the check refuses"] += 1
            return
        is_legal = _is_legal(trial, inputs, attributes)
        if not trial.handler_only:
            _expect_check_values(trial, inputs, attributes, is_legal)
            self.calls[f"trials that {'are legal' if is_legal else 'the handler refuses'}"] += 1
        is_moderate = all(
            x.name != "scale" or abs(x.value) <= _LARGEST_SCALE for x in trial.changes
        )
        expected = Expected(trial.op, inputs, attributes)
        number = _number(trial)
        more = THREADS[number % len(THREADS)]
        for i, name in enumerate(self._sets):
            with cpu_instruction_set(name):
                first = self._handler(call, trial, 1)
                self.calls[name] += 1
                if trial.handler_only:
                    self.calls[f"handler alone {'refuses' if first.error else 'runs'}"] += 1
                    continue
                if (first.error is None) != is_legal:
                    what = first.error or "it accepts an illegal call"
                    raise Failure("the handler refuses exactly what is illegal", what)
                if is_legal and is_moderate:
                    _expect("the result is the oracle's", expected.compare, first.results)
                same(
                    "any number of threads gives the same", self._handler(call, trial, more), first
                )
                for backend_name, backend in self._backends.items():
                    # A call through a compiler takes long: one instruction set a trial.
                    is_chosen = backend_name == "eager" or number % len(self._sets) == i
                    if is_chosen and backend.takes(inputs):
                        through = backend.call(trial, inputs, attributes, more)
                        same(f"the backend {backend_name} gives the same", through, first)
                        self.calls[f"{backend_name} on {name}"] += 1

    def _checked(self, trial: Trial, inputs: Any, attributes: dict[str, Any]) -> Any:
        """The checked call and its arrays; None if the check refuses it, rightly."""
        is_legal = _numbers_are_legal(trial, attributes)
        try:
            wanted = {"return_lse": True} if trial.op == "varlen_attention" else {}
            call = checked_call(trial.op, inputs, attributes | wanted)
        except (ValueError, TypeError) as error:
            if is_legal:
                raise Failure("the check accepts legal numbers", error) from error
            for name, backend in self._backends.items():
                if backend.call(trial, inputs, attributes, 1).error is None:
                    raise Failure("illegal numbers are refused", f"not by {name}") from error
            for name in self._sets:
                self.calls[name] += 1
            return None
        if not is_legal:
            raise Failure("illegal numbers are refused", "not by the check")
        return call

    def _handler(self, checked: Any, trial: Trial, num_threads: int) -> Outcome:
        """Calls the handler on arrays between guard pages. With changes of its attributes, it may
        refuse the call or run."""
        call, arrays = checked
        arrays, row_attributes = _with_wider_rows(trial, call, arrays)
        given = [guarded(x) for x in arrays]
        places = in_place(call)
        results = [
            given[places[i]] if i in places else guarded(np.full(spec.shape, np.nan, spec.dtype))
            for i, spec in enumerate(call.results)
        ]
        attributes = trial.handler_attributes(numbers(call) | row_attributes)
        handler = eager_call(call.target, attributes, specs(given), specs(results))

        def run() -> tuple[np.ndarray, ...]:
            addresses = [[x.ctypes.data for x in some] for some in (given, results)]
            handler(*addresses, num_threads)
            return _dense(call, results)

        outcome = Outcome(run, (ValueError,))
        _expect_unchanged(given, arrays, () if outcome.error else places.values())
        if trial.op == "varlen_attention" and not outcome.error and not trial.handler_only:
            output, lse = outcome.results
            outcome.results = (output, *_gradients(call, given, output, lse, num_threads))
        return outcome


def _gradients(
    call: Call, arrays: Sequence[Any], output: Any, lse: Any, num_threads: int
) -> list[np.ndarray]:
    """The gradients of a checked call by the handler, between guard pages."""
    by_name = dict(zip(call.names, arrays, strict=True))
    dout = _dout(SimpleNamespace(**by_name))
    by_name |= {"output": guarded(output), "lse": guarded(lse), "dout": guarded(dout)}
    options = {name: x for name, x in call.options if name != "return_lse"}
    given = dict(zip(by_name, specs([*by_name.values()]), strict=True))
    backward = varlen_attention_backward.check(**given, **options)
    operands = [by_name[name] for name in backward.names]
    results = [guarded(np.full(x.shape, np.nan, x.dtype)) for x in backward.results]
    handler = eager_call(backward.target, numbers(backward), specs(operands), specs(results))
    addresses = [[x.ctypes.data for x in some] for some in (operands, results)]
    handler(*addresses, num_threads)
    return results


def _with_wider_rows(trial: Trial, call: Call, arrays: Sequence[np.ndarray]) -> Any:
    query = dict(call.attributes).get("query") if trial.op == "kv_cache_update" else None
    return with_wider_rows(trial.op, arrays, trial.more_columns, query)


def _dense(call: Call, results: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The results, without what wider rows have besides a query."""
    return tuple(rows_in(x, spec.shape) for x, spec in zip(results, call.results, strict=False))


def _number(trial: Trial) -> int:
    """A number that chooses among what a trial may be run with."""
    return zlib.crc32(trial.case.id.encode())


def _is_legal(trial: Trial, inputs: Any, attributes: dict[str, Any]) -> bool:
    if trial.op == "kv_cache_update":
        is_latent = inputs.value.shape[2] == 0
        return reference.tokens_are_legal(
            inputs.kv_cache, inputs.slot_mapping, is_latent=is_latent, **attributes
        )
    if trial.op == "varlen_attention":
        operands, value = reference.as_paged(*inputs, attributes.get("prefix_seqs"))
        attributes = attributes | {"value_cache": value, "kv_layout": reference.PAGED_LAYOUT}
        inputs = operands
    legal = reference.legal_sequences(*inputs, **attributes)
    return legal is not None and all(legal)


def _numbers_are_legal(trial: Trial, attributes: dict[str, Any]) -> bool:
    if trial.op == "kv_cache_update":
        return True
    return reference.numbers_are_legal(trial.case.head_size, **attributes)


def _expect(promise: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except AssertionError as error:
        raise Failure(promise, error) from error


def _expect_unchanged(
    arrays: Sequence[np.ndarray], before: Sequence[np.ndarray], written: Iterable[int] = ()
) -> None:
    for i, (array, value) in enumerate(zip(arrays, before, strict=True)):
        if i not in {*written}:
            _expect("a call writes nothing but its results", assert_same_bits, array, value)


def _expect_check_values(
    trial: Trial, inputs: Any, attributes: dict[str, Any], is_legal: bool
) -> None:
    """The public checks of values say what the oracle says."""
    if trial.op == "varlen_attention":
        return
    if trial.op == "paged_attention":
        names = ("sliding_window", "causal", "window_right", "kv_layout", "max_query_len")
        names += ("tree_mask", "bidirectional_ranges")
        options = {name: attributes[name] for name in names if name in attributes}
        check = partial(paged_attention.check_values, *inputs, **options)
    else:
        names = ("kv_layout", "positions", "cos_sin_cache")
        options = {name: attributes[name] for name in names if name in attributes}
        check = partial(
            kv_cache_update.check_values, inputs.kv_cache, inputs.slot_mapping, **options
        )
    error = Outcome(check, (ValueError,)).error
    if (error is None) != is_legal:
        raise Failure("check_values finds exactly what is illegal", error or "it found nothing")


def same(promise: str, actual: Outcome, expected: Outcome) -> None:
    """Raises Failure unless two calls gave the same bits, or the same error."""
    messages = [x.error and x.error.removeprefix("INVALID_ARGUMENT: ") for x in (actual, expected)]
    if messages[0] != messages[1]:
        raise Failure(promise, f"{actual.error or 'no error'}, not {expected.error or 'no error'}")
    if expected.error is None:
        _expect(promise, assert_same_bits, actual.results, expected.results)


def trained_in_torch(
    inputs: Any, attributes: dict[str, Any], device: Any = "cpu"
) -> tuple[np.ndarray, ...]:
    """An output of varlen_attention and its gradients by autograd."""
    import torch  # noqa: PLC0415

    import torch_frontend  # noqa: PLC0415
    from harness.arrays import to_torch  # noqa: PLC0415

    arrays, options = split_keywords(inputs._asdict() | attributes)
    tensors = {name: to_torch(x).to(device) for name, x in arrays.items()}
    leaves = [tensors[name] for name in varlen.DIFFERENTIABLE if name in tensors]
    for leaf in leaves:
        leaf.requires_grad_()
    output = torch_frontend.varlen_attention(**tensors, **options)
    dout = to_torch(_dout(inputs)).to(device)
    gradients = torch.autograd.grad(output, leaves, dout)
    return tuple(_to_numpy(x) for x in (output.detach(), *gradients))


def _trained_in_jax(inputs: Any, attributes: dict[str, Any]) -> tuple[np.ndarray, ...]:
    arrays, options = split_keywords(inputs._asdict() | attributes)
    results: tuple[np.ndarray, ...] = _gradient_function(tuple(options.items()))(
        arrays, _dout(inputs)
    )
    return tuple(map(np.asarray, results))


@lru_cache(maxsize=64)
def _gradient_function(options: tuple[tuple[str, Any], ...]) -> Any:
    import jax  # noqa: PLC0415

    import jax_frontend  # noqa: PLC0415

    def differentiate(arrays: Any, dout: Any) -> Any:
        others = dict(arrays)
        leaves = {x: others.pop(x) for x in varlen.DIFFERENTIABLE if x in arrays}
        attend = partial(jax_frontend.varlen_attention, **dict(options))
        output, pullback = jax.vjp(lambda leaves: attend(**leaves, **others), leaves)
        return output, *map(pullback(dout)[0].__getitem__, leaves)

    return jax.jit(differentiate)


class EagerBackend:
    """Eager PyTorch, on arrays between guard pages, and on rows that are part of wider ones. Half
    of the trials that may have an argument `out` have it."""

    def takes(self, inputs: Any) -> bool:
        return True

    def call(
        self, trial: Trial, inputs: Any, attributes: dict[str, Any], num_threads: int | None
    ) -> Outcome:
        op = trial.op
        import torch  # noqa: PLC0415

        import torch_frontend  # noqa: F401, PLC0415  (defines torch.ops.xla_gpu)

        if op == "varlen_attention":
            torch.set_num_threads(num_threads or torch.get_num_threads())
            return Outcome(lambda: trained_in_torch(inputs, attributes), (ValueError, TypeError))

        overload, attributes = overload_of(op, attributes)
        arrays, options = split_keywords(attributes)
        dense = [*inputs, *arrays.values()]
        place = len(inputs) + [*arrays].index("query") if "query" in arrays else None
        wider, _ = with_wider_rows(op, dense, trial.more_columns, place)
        given = [guarded(x) for x in wider]
        tensors = [
            shared_with_torch(x)[:, : math.prod(array.shape[1:])].view(array.shape)
            if x.shape != array.shape
            else shared_with_torch(x)
            for x, array in zip(given, dense, strict=True)
        ]
        keywords = dict(zip(arrays, tensors[len(inputs) :], strict=True))
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        by_name = dict(zip(arrays, given[len(inputs) :], strict=True))
        if overload is torch.ops.xla_gpu.paged_attention.default and _number(trial) % 2:
            num_tokens, num_heads, head_size = inputs.query.shape
            columns = options.get("value_head_size") or head_size
            if "value_cache" in arrays:
                columns = unpacked(arrays["value_cache"]).shape[-1]
            if 1 <= columns <= head_size:
                out = np.full((num_tokens, num_heads, columns), 99).astype(inputs.query.dtype)
                keywords["out"] = shared_with_torch(guarded(out))
                overload = torch.ops.xla_gpu.paged_attention.out

        def run() -> tuple[np.ndarray, ...]:
            result = overload(*tensors[: len(inputs)], **keywords, **options)
            if op == "kv_cache_update":
                names = [name for name in kv_cache_update.WRITTEN if name in by_name]
                return (given[0], *[rows_in(by_name[x], arrays[x].shape) for x in names])
            results = result if isinstance(result, tuple) else (result,)
            return tuple(_to_numpy(x) for x in results)

        outcome = Outcome(run, (ValueError, TypeError))
        if outcome.error or op == "paged_attention":
            _expect_unchanged(given, wider)
        return outcome


class JaxBackend:
    """JAX, a compiled function for each op and its numbers."""

    def takes(self, inputs: Any) -> bool:
        """JAX drops the upper bits of 64-bit slots in compiled functions."""
        slots = getattr(inputs, "slot_mapping", None)
        if slots is None:
            return _is_run_by_xla(inputs)
        return bool((slots == slots.astype(np.int32)).all())

    def call(
        self, trial: Trial, inputs: Any, attributes: dict[str, Any], num_threads: int | None
    ) -> Outcome:
        op = trial.op
        import jax  # noqa: PLC0415

        if op == "varlen_attention":
            errors = (ValueError, TypeError, jax.errors.JaxRuntimeError)
            return Outcome(lambda: _trained_in_jax(inputs, attributes), errors)
        arrays, options = split_keywords(attributes)
        function = _jitted(op, tuple(options.items()))
        errors = (ValueError, TypeError, jax.errors.JaxRuntimeError)
        return Outcome(lambda: jax.tree.map(np.asarray, function(*inputs, **arrays)), errors)


@lru_cache(maxsize=64)
def _jitted(op: str, options: tuple[tuple[str, Any], ...]) -> Any:
    from tests.support import backends  # noqa: PLC0415  (imports the frameworks)

    return backends.jitted(op, **dict(options))


def _is_run_by_xla(inputs: Any) -> bool:
    """XLA leaves out a call whose results have no elements, and with it the call's error."""
    return inputs[0].size > 0


class TorchXlaBackend:
    """torch_xla's lazy mode."""

    def takes(self, inputs: Any) -> bool:
        return _is_run_by_xla(inputs)

    def call(
        self, trial: Trial, inputs: Any, attributes: dict[str, Any], num_threads: int | None
    ) -> Outcome:
        op = trial.op
        from tests.support import backends  # noqa: PLC0415  (imports the frameworks)

        errors = (ValueError, TypeError, RuntimeError)
        if op == "varlen_attention":
            on_xla = partial(trained_in_torch, inputs, attributes, backends.xla_device())
            outcome = Outcome(on_xla, errors)
        else:
            outcome = Outcome(lambda: backends.in_torch_xla(op, *inputs, **attributes), errors)
        if outcome.error:
            backends.forget_failed_steps()
        return outcome


BACKENDS: dict[str, Callable[[], Any]] = {
    "eager": EagerBackend,
    "jax": JaxBackend,
    "torch_xla": TorchXlaBackend,
}


def _to_numpy(tensor: Any) -> np.ndarray:
    from harness.arrays import to_numpy  # noqa: PLC0415

    return to_numpy(tensor)


class EmulatedRunner:
    """Runs trials on the CUDA handlers, emulated: they refuse nothing, but rows of a faulty sequence
    are NaN, and a slot past the end is not written."""

    def __init__(self, native: Any) -> None:
        self._gpus = [gpu.EmulatedGpu(native, kernels) for kernels in native.cuda_choices()]
        self.calls: Counter[str] = Counter()

    def run(self, trial: Trial) -> None:
        """Raises Failure if a promise does not hold."""
        inputs, attributes = trial.arguments()
        if not _numbers_are_legal(trial, attributes):
            return
        runs = {
            "paged_attention": self._attend,
            "kv_cache_update": self._update,
            "varlen_attention": self._train,
        }
        run = self._handler_alone if trial.handler_only else runs[trial.op]
        seed = len(inputs[0]) + inputs[0].size % 7
        gpus = self._gpus
        if trial.op == "varlen_attention":
            is_large = len(inputs[0]) * inputs[0].shape[1] > _MOST_TRAINED_ROWS
            if is_large or trial.handler_only:
                return
            gpus = gpus[:1]  # they share the kernels of the derivative
        for device in gpus:
            try:
                run(device, trial, inputs, attributes, seed)
            except RuntimeError as error:
                raise Failure("a kernel stays within its arrays", error) from error
            self.calls[f"emulated, {device.kernels}"] += 1

    def _handler_alone(
        self, device: Any, trial: Trial, inputs: Any, attributes: dict[str, Any], seed: int
    ) -> None:
        """With changes of its attributes, the handler may refuse the call or run."""
        call, arrays = checked_call(trial.op, inputs, attributes)
        arrays, row_attributes = _with_wider_rows(trial, call, arrays)
        given = [guarded(x) for x in arrays]
        results = [guarded(x) for x in results_of(call, arrays)]
        for result, operand in in_place(call).items():
            results[result] = given[operand]
        if trial.op == "paged_attention":
            results.append(gpu.scratch_of(inputs, attributes))
        op = paged_attention if trial.op == "paged_attention" else kv_cache_update
        with contextlib.suppress(ValueError):
            changed = trial.handler_attributes(numbers(call) | row_attributes)
            device.run(op, given, results, seed, **changed)

    def _train(
        self, device: Any, trial: Trial, inputs: Any, attributes: dict[str, Any], seed: int
    ) -> None:
        arguments, dout = inputs._asdict() | attributes, _dout(inputs)
        arguments = {name: x for name, x in arguments.items() if x is not None}
        forward = varlen_calls.attend(device, arguments, seed)
        gradients = varlen_calls.differentiate(device, arguments, dout, forward, seed)
        has_large_logits = any(
            x.name == "scale" and abs(x.value) > _LARGEST_SCALE for x in trial.changes
        )
        if has_large_logits or not _is_legal(trial, inputs, attributes):
            return
        _, expected = varlen.oracle(arguments, dout)
        check = partial(varlen_calls.assert_close, gradients, inputs.query.dtype.name)
        _expect("the gradients are the oracle's", check, expected)

    def _attend(
        self, device: Any, trial: Trial, inputs: Any, attributes: dict[str, Any], seed: int
    ) -> None:
        more = trial.more_columns
        result = gpu.attend(device, inputs, seed=seed, more_columns=more, **attributes)
        if any(x.name == "scale" and abs(x.value) > _LARGEST_SCALE for x in trial.changes):
            return
        legal = reference.legal_sequences(*inputs, **attributes)
        if legal is None:
            return  # few rows can be assigned to a sequence
        if all(legal):
            check = Oracle(inputs, attributes).assert_close_on_cuda
            _expect("the result is the oracle's", check, result)
            return
        results = result if isinstance(result, tuple) else (result,)
        for s, is_legal in enumerate(legal):
            rows = slice(*(int(x) for x in inputs.query_start_loc[s : s + 2]))
            if not is_legal:
                if not np.isnan(results[0][rows].astype(np.float32)).all():
                    raise Failure("rows of a faulty sequence are NaN", f"not of sequence {s}")
                continue
            one = inputs._replace(
                context_lens=inputs.context_lens[s : s + 1],
                block_tables=inputs.block_tables[s : s + 1],
                query_start_loc=inputs.query_start_loc[s : s + 2],
                num_seqs=np.array(1, np.int32),
            )
            alone = [np.full_like(x, fill) for x, fill in zip(results, (0, -np.inf), strict=False)]
            for to, x in zip(alone, results, strict=True):
                to[rows] = x[rows]
            own = attributes
            if np.ndim(attributes.get("causal", True)) > 0:
                own = attributes | {"causal": attributes["causal"][s : s + 1]}
            check = Oracle(one, own).assert_close_on_cuda
            _expect(
                "the result of a legal sequence is the oracle's",
                check,
                tuple(alone) if len(alone) > 1 else alone[0],
            )

    def _update(
        self, device: Any, trial: Trial, inputs: Any, attributes: dict[str, Any], seed: int
    ) -> None:
        call, arrays = checked_call(trial.op, inputs, attributes)
        arrays, row_attributes = _with_wider_rows(trial, call, arrays)
        given = [guarded(x) for x in arrays]
        updated = [given[operand] for operand, _ in call.aliases]
        device.run(kv_cache_update, given, updated, seed, **numbers(call), **row_attributes)
        slots = np.array(inputs.slot_mapping)
        shape = reference.layouts.default_shape(
            [x for x in (inputs.kv_cache, attributes.get("value_cache")) if x is not None],
            attributes.get("kv_layout"),
            is_latent=inputs.value.shape[2] == 0,
        )
        is_faulty = np.zeros(len(slots), bool)
        if "positions" in attributes:
            table = attributes["cos_sin_cache"]
            is_faulty = (slots >= 0) & ~reference.have_rows(attributes["positions"], table)
        slots[is_faulty | (slots >= shape[0] * shape[1])] = -1
        used = slots[slots >= 0]
        if len({*used.tolist()}) < len(used):
            return  # it is not defined which token remains
        expected = reference.kv_cache_update(*inputs._replace(slot_mapping=slots), **attributes)
        found = _dense(call, updated)
        if "query" in attributes:
            expected[-1][is_faulty] = found[-1][is_faulty]
            if not np.isnan(found[-1][is_faulty].astype(np.float32)).all():
                raise Failure("the query of a faulty position is NaN", "it is not")
        _expect(
            "caches and query are the oracle's",
            assert_same_bits,
            found if len(found) > 1 else found[0],
            expected,
        )
