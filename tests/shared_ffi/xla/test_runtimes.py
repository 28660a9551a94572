"""Registration of the handlers: once, from any thread, and not with a runtime that is too old."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shared_ffi import OPS, _native, library_path
from shared_ffi.xla import elf, runtimes
from tests.support import native, scripts, without_python

TARGETS = sorted(op.TARGET for op in OPS)


def python(script: str, **environment: str) -> str:
    """Runs a script in a process of its own. Returns its standard output."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PJRT_DEVICE": "CPU"} | environment,
        timeout=300,
    ).stdout


def test_targets_have_handlers() -> None:
    assert sorted(_native.handlers()["cpu"]) == TARGETS


def test_built_for_the_oldest_supported_runtime() -> None:
    assert runtimes.FFI_VERSION == (0, 1)


def test_registered_with_both_runtimes() -> None:
    import jax  # noqa: F401, PLC0415
    import torch_xla  # noqa: F401, PLC0415

    runtimes.register()
    both = {"cpu": TARGETS, "cuda": TARGETS}
    assert runtimes.registered() == {"jaxlib": both, "torch_xla": {"cpu": TARGETS}}


def test_registering_loads_no_framework() -> None:
    assert (
        python("""
        import sys, shared_ffi
        shared_ffi.register()
        print(sorted({"jax", "torch", "torch_xla"} & set(sys.modules)), shared_ffi.registered())
    """)
        == "[] {}\n"
    )


def test_registered_once_from_many_threads() -> None:
    out = python("""
        import threading, jax, torch_xla
        from shared_ffi.xla import runtimes
        calls = []
        for name, (is_present, function) in list(runtimes._RUNTIMES.items()):
            def counted(name=name, function=function):
                calls.append(name)
                return function()
            runtimes._RUNTIMES[name] = (is_present, counted)
        barrier = threading.Barrier(16)
        def register():
            barrier.wait()
            runtimes.register()
        threads = [threading.Thread(target=register) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(sorted(calls))
    """)
    assert out == "['jaxlib', 'torch_xla']\n"


@pytest.mark.parametrize(
    ("version", "loads"), [((0, 0), False), ((0, 1), True), ((0, 5), True), ((1, 1), False)]
)
def test_version_rule(version: tuple[int, int], loads: bool) -> None:
    if loads:
        runtimes.check_version("jaxlib", version)
        return
    with pytest.raises(RuntimeError) as raised:
        runtimes.check_version("jaxlib", version)
    words = str(raised.value)
    assert "built for XLA FFI 0.1" in words and "speaks XLA FFI {}.{}".format(*version) in words


def test_a_runtime_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax  # noqa: F401, PLC0415

    monkeypatch.setattr(runtimes, "_registered", {"torch_xla": {}})
    monkeypatch.setattr(runtimes, "jaxlib_ffi_version", lambda: (0, 0))
    with pytest.raises(
        RuntimeError, match="cannot be registered with jaxlib, which speaks XLA FFI 0.0"
    ):
        runtimes.register()
    assert "jaxlib" not in runtimes.registered()


def test_versions_are_read_from_the_runtimes() -> None:
    assert runtimes.jaxlib_ffi_version() >= (0, 1)
    assert runtimes.torch_xla_ffi_version() == (0, 1)


def test_a_missing_symbol() -> None:
    with pytest.raises(LookupError, match="symtab"):
        elf.address_of_local_function(_native.__file__, "nowhere", exported="PyInit__native")


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        (["int wanted(void) { return 7; }"], None),
        (["static int wanted(void) { return 7; } int (*get(void))(void) { return wanted; }"], None),
        (["int wanted(void); int use(void) { return wanted(); }"], "no functions wanted"),
        (["int wanted = 7;"], "no functions wanted"),
        (["int unwanted(void) { return 7; }"], "no functions wanted"),
        (
            [
                f"static int wanted(void) {{ return {i}; }} int (*get{i}(void))(void) {{ return wanted; }}"
                for i in range(2)
            ],
            "2 functions wanted",
        ),
    ],
    ids=["exported", "static", "imported", "variable", "suffix", "two"],
)
def test_the_lookup_of_a_function(sources: list[str], error: str | None, tmp_path: Path) -> None:
    """An imported symbol has the value 0: the file's first byte would be called."""
    for number, source in enumerate(["int first(void) { return 1; }", *sources]):
        (tmp_path / f"{number}.c").write_text(source)
    path = tmp_path / "library.so"
    outcome = native.run("gcc", "-shared", "-fPIC", "-o", path, *sorted(tmp_path.glob("*.c")))
    assert outcome.returncode == 0, outcome.stdout
    library = ctypes.PyDLL(str(path), mode=os.RTLD_LAZY)
    if error is None:
        address = elf.address_of_local_function(str(path), "wanted", exported="first")
        assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 7
    else:
        with pytest.raises(LookupError, match=f"{error} in .symtab"):
            elf.address_of_local_function(str(path), "wanted", exported="first")
    del library


def test_a_stripped_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla  # noqa: F401, PLC0415

    monkeypatch.setattr(runtimes, "_XLA_FFI_GET_API", "nowhere")
    with pytest.raises(RuntimeError, match="cannot find XLA's FFI registry in torch_xla"):
        runtimes.torch_xla_ffi_version()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_subinterpreter_is_refused(is_first: bool) -> None:
    """The main interpreter works as before, whether it has the module already or not."""
    lines = scripts.output(
        """
        import sys
        try:
            import _interpreters as interpreters  # Python 3.13
        except ImportError:
            import _xxsubinterpreters as interpreters
        if sys.argv[1] == "True":
            import shared_ffi
        other = interpreters.create()
        script = f"import sys; sys.path[:0] = {[x for x in sys.path if x]!r}; import shared_ffi"
        try:
            print(interpreters.run_string(other, script))
        except interpreters.RunFailedError as error:
            print(error)
        import torch, torch_frontend
        ones = torch.ones(3)
        print(torch.ops.xla_gpu.simple_add(ones, ones).tolist())
        """,
        str(is_first),
    )
    message = "shared_ffi: must be imported in the main interpreter of a process; got a subinterp"
    assert message in lines[0]
    assert lines[1] == "[2.0, 2.0, 2.0]"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_python.compile_program(library_path(), tmp_path_factory.mktemp("program"))


@pytest.mark.parametrize("value", [None, "", *_native.cpu_instruction_sets(), "mmx"])
def test_the_environment_chooses_the_instruction_set(value: str | None, program: Path) -> None:
    """It does so for Python and for a program without it."""
    offered = _native.cpu_instruction_sets()
    assert _native.cpu_instruction_set() == offered[0] and offered[-1] == "baseline"
    setting = {} if value is None else {"XLA_GPU_CPU_ISA": value}
    script = "from shared_ffi import _native; print(_native.cpu_instruction_set())"
    in_python = scripts.run(script, **setting)
    ops = ("paged_attention", "varlen_attention", "varlen_attention_backward")
    *errors, chosen = without_python.errors(program, "cpu", *ops, **setting)
    if value == "mmx":
        error = (
            f"the CPU's instruction set (XLA_GPU_CPU_ISA) must be one of {', '.join(offered)} on "
            f"this processor; got mmx. Unset it for {offered[0]}"
        )
        assert in_python.stderr.endswith(f"ImportError: shared_ffi: {error}\n")
        assert errors == [f"{op}: {error}" for op in ops] and chosen == "unknown"
    else:
        name = value or offered[0]
        assert in_python.stdout == f"{name}\n", in_python.stderr
        assert all("operand query is missing" in x for x in errors) and chosen == name


WITHOUT_MEMORY = """
    import resource, sys, time
    import ml_dtypes
    import numpy as np
    from shared_ffi import _native, paged_attention, simple_add
    from shared_ffi.spec import ArraySpec

    runtime, MIB = sys.argv[1], 2**20
    spec_of = lambda x: ArraySpec(x.shape, str(x.dtype))
    integers = lambda *x: np.array(x, np.int32)
    q_len, length = 500, 2000
    tables = np.arange(length // 16, dtype=np.int32)[None]
    metadata = [integers(length), tables, integers(0, q_len), integers(1)]
    shapes = [(q_len, 4, 576), (length // 16, 16, 2, 576)]
    rows = [np.resize(np.sin(np.arange(999)), x).astype(ml_dtypes.bfloat16) for x in shapes]
    arrays, out = rows + metadata, np.zeros(shapes[0], ml_dtypes.bfloat16)

    def handler_of(call):
        attributes = {name: value.item() for name, value in call.attributes}
        handler = _native.handlers()["cpu"][call.target]
        return _native.EagerCall(handler, attributes, call.operands, call.results)

    handler = handler_of(paged_attention.check(*map(spec_of, arrays), 0.1))

    def attend():
        handler([x.ctypes.data for x in arrays], [out.ctypes.data], 2)
        return out.tobytes()

    ones, twos = np.ones((2, 2**20), np.float32)
    adder = handler_of(simple_add.check(spec_of(ones), spec_of(ones)))

    def add():  # takes no memory, but for threads that must be started
        adder([ones.ctypes.data] * 2, [twos.ctypes.data], 2)
        return (twos == 2).all()

    if runtime == "openmp":
        import torch
    if runtime == "xla":
        import jax, jax_frontend
        arrays = [jax.numpy.asarray(x) for x in arrays]
        attend_and_sum = lambda *x: jax_frontend.paged_attention(*x, 0.1).astype("float32").sum()
        compiled = jax.jit(attend_and_sum).lower(*arrays).compile()

        def attend():
            for _ in range(6000):
                try:
                    return float(compiled(*arrays))
                except Exception as error:  # the failed call before may hold its arrays for a while
                    if "Out of memory allocating" not in str(error):
                        raise
                time.sleep(0.01)
            raise TimeoutError("the arrays of a failed call stay")

    elif runtime == "no thread":
        attend = add
    else:
        add()

    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * MIB, -1))
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(attend())
        except Exception as error:
            outcomes.append(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    after = attend()
    for x in outcomes:
        print(type(x).__name__, x if isinstance(x, Exception) else x == after)
"""


@pytest.mark.parametrize("runtime", ["own threads", "no thread", "openmp", "xla"])
def test_a_thread_without_memory_is_an_error_of_the_call(runtime: str) -> None:
    """A limit leaves memory for results, and none for what a thread needs. The process goes on."""
    glibc = {"ARENA_MAX": "1", "TRIM_THRESHOLD_": "0", "MMAP_THRESHOLD_": "65536"}
    settings = {f"MALLOC_{name}": value for name, value in glibc.items()}
    lines = scripts.output(WITHOUT_MEMORY, runtime, **settings)
    assert len(lines) == 3
    for kind, _, message in [line.partition(" ") for line in lines]:
        if runtime == "no thread":
            assert message == "True"
            continue
        expected = "paged_attention: the host has no memory left for the call, whose results may"
        if runtime == "xla":
            assert kind in ("JaxRuntimeError", "ValueError")
            assert message.startswith(f"RESOURCE_EXHAUSTED: {expected}")
        else:
            assert kind == "MemoryError" and message.startswith(expected)


LATE_TEAM = """
    #define _GNU_SOURCE
    #include <pthread.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    int teams = 0;
    long long nanoseconds = 1000000000;
    // A clock that stands still unless it is set: no other program makes a thread late.
    int clock_gettime(clockid_t clock, struct timespec* now) {
      if (clock != CLOCK_MONOTONIC) return syscall(SYS_clock_gettime, clock, now);
      now->tv_sec = nanoseconds / 1000000000;
      now->tv_nsec = nanoseconds % 1000000000;
      return 0;
    }
    struct Work { void (*function)(void*); void* data; };
    static void* run(void* work) {
      ((struct Work*)work)->function(((struct Work*)work)->data);
      return 0;
    }
    void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags) {
      struct Work work = {function, data};
      pthread_t thread;
      ++teams;
      function(data);
      nanoseconds += 20000000;
      pthread_create(&thread, 0, run, &work);
      pthread_join(thread, 0);
    }
"""

BESIDE_A_LATE_TEAM = """
    import ctypes
    import numpy as np
    from shared_ffi import _native, simple_add
    from shared_ffi.spec import ArraySpec

    teams = ctypes.c_int.in_dll(ctypes.CDLL(None), "teams")
    nanoseconds = ctypes.c_longlong.in_dll(ctypes.CDLL(None), "nanoseconds")
    ones, sums = np.ones((2, 2**20), np.float32)
    spec = ArraySpec(ones.shape, "float32")
    call = simple_add.check(spec, spec)
    handler = _native.handlers()["cpu"][call.target]
    add = _native.EagerCall(handler, {}, call.operands, call.results)
    for milliseconds in (0, 0, 1999, 1):
        nanoseconds.value += milliseconds * 1_000_000
        sums[:] = 0
        add([ones.ctypes.data] * 2, [sums.ctypes.data], 2)
        print(teams.value, (sums == 2).all())
"""


def test_calls_do_without_openmp_while_its_threads_come_late(tmp_path: Path) -> None:
    """A thread that comes 20 ms after the work was done costs the next two seconds, but for the
    first call, which starts the threads."""
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(textwrap.dedent(LATE_TEAM))
    native.run("gcc", "-shared", "-fPIC", "-pthread", "-o", library, source)
    lines = scripts.output(BESIDE_A_LATE_TEAM, LD_PRELOAD=str(library))
    assert lines == ["1 True", "2 True", "2 True", "3 True"]


# Missing frameworks. None in sys.modules makes an import fail as if the package were not installed.

WITHOUT = """
    import sys
    for module in {missing!r}:
        sys.modules[module] = None
"""


def test_torch_eager_needs_neither_jax_nor_torch_xla() -> None:
    assert (
        python(
            WITHOUT.format(missing=["jax", "jaxlib", "torch_xla"])
            + """
    import torch, torch_frontend
    print(torch.ops.xla_gpu.simple_add(torch.ones(1), torch.ones(1)).item())
    """
        )
        == "2.0\n"
    )


def test_jax_needs_no_torch() -> None:
    assert (
        python(
            WITHOUT.format(missing=["torch", "torch_xla", "elftools"])
            + """
    import jax_frontend
    print(jax_frontend.simple_add([1.0], [1.0]))
    """
        )
        == "[2.]\n"
    )


@pytest.mark.parametrize(
    ("missing", "use", "message"),
    [
        (
            "jax",
            "import jax_frontend",
            "jax_frontend needs JAX, which is not installed: pip install 'xla-paged-attention[jax]'",
        ),
        (
            "torch",
            "import torch_frontend",
            "torch_frontend needs PyTorch, which is not installed: pip install 'xla-paged-attention[torch]'",
        ),
        (
            "jax",
            "import torch, torch_xla, torch_frontend; x = torch.ones(1, device='xla'); torch.ops.xla_gpu.simple_add(x, x)",
            "torch_frontend needs JAX to write the HLO of its ops for XLA tensors, and JAX is not installed: pip install 'xla-paged-attention[torch-xla]'",
        ),
    ],
    ids=["jax_frontend", "torch_frontend", "torch_xla"],
)
def test_the_error_names_the_missing_package(missing: str, use: str, message: str) -> None:
    out = python(
        WITHOUT.format(missing=[missing])
        + f"""
    try:
        {use}
    except ImportError as error:
        print(error)
    """
    )
    assert message in out


def test_the_library_exports_only_what_others_call() -> None:
    lines = native.run("nm", "-D", "-C", "--defined-only", library_path()).stdout.splitlines()
    symbols = [line.split(" ", 2)[1:] for line in lines]
    ours = [name for kind, name in symbols if kind == "T" and "xla_gpu" in name]
    qualified = {re.split(r"[(\[]", name)[0] for name in ours}
    # A class exports its members, too.
    names = {re.sub(r"::EagerCall::.*", "::EagerCall", x).split("::")[-1] for x in qualified}
    cuda_names = {"ChooseCuda", "CudaChoice", "CudaChoiceError", "CudaChoices"}
    cuda_names |= {"CudaKernelsInUse", "KernelLaunches", "SetMaxBlocks"}
    assert names - cuda_names == {
        "EagerCall",
        "ChooseCpuInstructionSet",
        "CpuInstructionSet",
        "CpuInstructionSetError",
        "CpuInstructionSets",
        "Handlers",
        "LongLived",
        "MetadataError",
        "aoti_torch_cpu__xla_gpu_call",
        "aoti_torch_cuda__xla_gpu_call",
        "xla_gpu_handler",
        "xla_gpu_last_error",
    }
