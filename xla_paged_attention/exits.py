"""How commands end, and what they say of a missing library. Imports no library, so that they begin
at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

_SHOW_CURSOR = b"\x1b[?25h"


def end_when_interrupted(end: Callable[[], object] = lambda: None) -> None:
    """From now on Ctrl-C ends this process at once, without a traceback, and SIGTERM likewise.

    A handler in Python would run when the main thread is back in Python, which may compile a
    program for minutes. This waits in a thread of its own.

    Args:
        end: what to do before.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the number is written to the pipe

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
            pass
        with contextlib.suppress(OSError):
            for stream in (1, 2):
                if os.isatty(stream):
                    os.write(stream, _SHOW_CURSOR + b"\n")  # rich hides it while it shows progress
                    break
        try:
            end()
        finally:
            os._exit(128 + number)  # as a shell has it

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def needs(command: str, requirements: str) -> Iterator[None]:
    """Ends the process with one line if a library that is imported within is missing, or has
    another version.

    Args:
        command: the name of the command.
        requirements: what pip is to install.
    """
    try:
        yield
    except ImportError as error:
        remedy = f": pip install {requirements}"
        sys.exit(f"{command}: {error}{'' if 'pip install' in str(error) else remedy}")
