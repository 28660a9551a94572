"""Calls from many threads, forks, interrupts and exits: `python -m tests.reliability.stress`.

Each scenario runs in a process of its own, counts its calls, and fails with an error. The results
of calls are compared bit for bit with those of the same calls made alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULE = "tests.reliability.stress"
ROOT = Path(__file__).parents[2]
SEED = 7
NUM_THREADS = 64
SECONDS_TO_END = 600  # for a process, besides the time that it is given


def _trials(count: int) -> list[Any]:
    """Calls of many shapes, a third of which are refused. Small and large ones."""
    from tests.reliability.fuzz import draw  # noqa: PLC0415

    families = itertools.cycle(["valid", "valid", "corrupt"])
    numbers = range(0, 100 * draw.GROUP * count, 11 * draw.GROUP + 1)
    drawn = (draw.trial(SEED, family, i) for family, i in zip(families, numbers, strict=False))
    return list(itertools.islice((x for x in drawn if not x.handler_only), count))


def _alone(backend: Any, trials: list[Any]) -> list[tuple[Any, Any, Any]]:
    """Trials, their arguments and the outcomes of calls made alone, of those that the backend supports."""
    calls = [(trial, *trial.arguments()) for trial in trials]
    return [(call, backend.call(*call, 2)) for call in calls if backend.takes(call[1])]  # type: ignore[misc]


def _in_threads(num_threads: int, work: Callable[[int], int]) -> int:
    """Runs work(thread) in threads. Returns the sum of what it returns, or raises its error."""
    counts: list[int] = []
    errors: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            counts.append(work(thread))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def _repeat_calls(backend: Any, expected: Any, seconds: float, thread: int) -> int:
    from tests.reliability.fuzz.run import same  # noqa: PLC0415

    rng, deadline, count = random.Random(thread), time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        call, alone = rng.choice(expected)
        same("a call gives what it gives alone", backend.call(*call, None), alone)
        count += 1
    return count


def eager_threads(seconds: float) -> int:
    """64 threads call the eager backend, with shapes and errors mixed."""
    from tests.reliability.fuzz.run import EagerBackend  # noqa: PLC0415

    backend = EagerBackend()
    expected = _alone(backend, _trials(120))
    return _in_threads(NUM_THREADS, lambda i: _repeat_calls(backend, expected, seconds, i))


def jax_threads(seconds: float) -> int:
    """16 threads compile and call through JAX at the same time."""
    import jax  # noqa: PLC0415

    from tests.reliability.fuzz.run import JaxBackend  # noqa: PLC0415

    backend = JaxBackend()
    expected = _alone(backend, _trials(24))
    jax.clear_caches()  # so that the threads compile
    return _in_threads(16, lambda i: _repeat_calls(backend, expected, seconds, i))


def both_frameworks(seconds: float) -> int:
    """Threads of PyTorch and of JAX in one process get the same bits."""
    from tests.reliability.fuzz.run import EagerBackend, JaxBackend  # noqa: PLC0415

    backends = (EagerBackend(), JaxBackend())
    expected = _alone(backends[1], _trials(24))
    return _in_threads(32, lambda i: _repeat_calls(backends[i % 2], expected, seconds, i))


def _large_call() -> Callable[[], bytes]:
    """A call that several threads work on, in eager PyTorch."""
    import torch  # noqa: PLC0415

    import torch_frontend  # noqa: F401, PLC0415

    torch.manual_seed(0)
    query, cache = torch.randn(64, 8, 64), torch.randn(8, 16, 16, 64)
    numbers = ([128], [list(range(8))], [0, 64], 1)
    metadata = [torch.tensor(x, dtype=torch.int32) for x in numbers]
    attend = torch.ops.xla_gpu.paged_attention
    return lambda: attend(query, cache, *metadata, 0.1).numpy().tobytes()


def forks(seconds: float) -> int:
    """Children of a process whose threads are in calls, and their children, call as well."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(4)
    run = _large_call()
    expected, is_over, count = run(), threading.Event(), 0

    def work(_: int) -> int:
        calls = 0
        while not is_over.is_set():
            assert run() == expected
            calls += 1
        return calls

    def fork_and_call(generation: int) -> int:
        if child := os.fork():
            return os.waitpid(child, 0)[1]
        signal.alarm(SECONDS_TO_END // 2)
        status = 1
        try:
            is_same = all(run() == expected for _ in range(3))
            failed = generation > 0 and fork_and_call(generation - 1) != 0
            status = int(failed or not is_same)
        finally:
            os._exit(status)

    def fork_repeatedly() -> None:
        nonlocal count
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = fork_and_call(generation=1)
            assert status == 0, f"a child ended with status {status}"
            count += 6

    callers = threading.Thread(target=lambda: totals.append(_in_threads(4, work)))
    totals: list[int] = []
    callers.start()
    try:
        fork_repeatedly()
    finally:
        is_over.set()
        callers.join()
    return count + sum(totals)


def interrupts(seconds: float) -> int:
    """SIGINT during calls raises KeyboardInterrupt, and later calls work."""
    run = _large_call()
    expected, count, caught = run(), 0, 0
    start = time.monotonic()
    run()
    longest = max(5e-3, 3 * (time.monotonic() - start))  # so that some calls end in time
    deadline = time.monotonic() + seconds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    while time.monotonic() < deadline or caught <= 10 or count == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, longest))
            while True:
                assert run() == expected
                count += 1
        except KeyboardInterrupt:
            caught += 1
    return count


_EXITS = {
    "threads that end after main": """
        threads = [threading.Thread(target=lambda: [run() for _ in range(20)]) for _ in range(8)]
        [thread.start() for thread in threads]
    """,
    "os._exit during calls": """
        [threading.Thread(target=loop, daemon=True).start() for _ in range(8)]
        time.sleep(0.2)
        os._exit(0)
    """,
    "daemon threads that atexit stops": """
        threads = [threading.Thread(target=loop, daemon=True) for _ in range(8)]
        atexit.register(lambda: (over.set(), [thread.join() for thread in threads]))
        [thread.start() for thread in threads]
        time.sleep(0.2)
    """,
    "sys.exit in a thread and in main": """
        thread = threading.Thread(target=lambda: (run(), sys.exit(3)))
        thread.start()
        run()
        sys.exit(0)
    """,
    "calls in atexit": """
        atexit.register(run)
        run()
    """,
}


def exits(seconds: float) -> int:
    """Processes that end while calls run, or after them, end with status 0 and no message."""
    script = f"""
        import atexit, os, sys, threading, time
        from {MODULE} import _large_call
        run, over = _large_call(), threading.Event()
        def loop():
            while not over.is_set():
                run()
    """
    deadline = time.monotonic() + seconds
    for count in itertools.count():
        if time.monotonic() > deadline and count >= len(_EXITS):
            return count
        name, ending = [*_EXITS.items()][count % len(_EXITS)]
        _run_script(name, script, ending)
    raise AssertionError


def _orders() -> Iterator[tuple[str, ...]]:
    modules = ["jax", "jax_frontend", "torch", "torch_frontend", "torch_xla"]
    orders = [*itertools.permutations(modules)]
    random.Random(SEED).shuffle(orders)
    return itertools.cycle(orders)


def imports(seconds: float) -> int:
    """Any order of imports works, and all backends give the same bits afterwards."""
    calls = """
        import numpy as np
        from tests.support import backends
        from tests.cases.sound_calls import add
        results = [backend("simple_add", *add().values()) for backend in backends.BACKENDS.values()]
        assert all((x == 2).all() for x in results) and len(results) == 4
    """
    deadline = time.monotonic() + seconds
    for count, order in enumerate(_orders(), 1):
        _run_script(", ".join(order), "\n".join(f"import {name}" for name in order), calls)
        if time.monotonic() > deadline:
            return 4 * count
    raise AssertionError


def _run_script(name: str, *parts: str) -> None:
    from tests.support import scripts  # noqa: PLC0415

    script = "\n".join(scripts.textwrap.dedent(part) for part in parts)
    outcome = scripts.run(script)
    assert outcome.returncode == 0, f"{name}: status {outcome.returncode}\n{outcome.stderr}"


SCENARIOS: dict[str, Callable[[float], int]] = {
    function.__name__: function
    for function in (
        eager_threads,
        jax_threads,
        both_frameworks,
        forks,
        interrupts,
        exits,
        imports,
    )
}


def run_alone(scenario: str, seconds: float, native: str | None = None) -> int:
    """Runs a scenario in a process of its own. Returns the number of calls."""
    command = [sys.executable, "-m", MODULE, "--scenario", scenario, "--seconds", str(seconds)]
    command += ["--native", native] if native else []
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU", MODULE: "alone"}
    outcome = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=seconds + SECONDS_TO_END,
    )
    assert outcome.returncode == 0, f"{scenario}: {outcome.returncode}\n{outcome.stderr[-3000:]}"
    return int(outcome.stdout.split()[-1])


def main() -> None:
    """Prints the number of calls of each scenario."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30, help="for each scenario")
    parser.add_argument("--scenario", nargs="*", default=[*SCENARIOS], choices=SCENARIOS)
    parser.add_argument("--native", help="the path of another build of shared_ffi._native")
    options = parser.parse_args()
    if os.environ.get(MODULE) == "alone":
        if options.native:
            from tests.support import native  # noqa: PLC0415  (before the frameworks)

            native.load(options.native, "shared_ffi._native")
        print(SCENARIOS[options.scenario[0]](options.seconds))
        return
    for scenario in options.scenario:
        count = run_alone(scenario, options.seconds, options.native)
        print(f"{count:9,} calls, 0 failures: {scenario}", flush=True)


if __name__ == "__main__":
    main()
