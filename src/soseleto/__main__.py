"""The entry point of the command line. What is imported takes a second, in which Ctrl-C ends with one line too."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from soseleto.errors import INTERRUPTED, STOPPED


def main() -> None:
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored, as in the background
        signal.signal(signal.SIGINT, _on_interrupt)
    from soseleto.cli.main import main as run

    run()


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """End at once within an import, which an exception would leave half done; compiled modules abort then."""
    caller = frame
    while caller is not None:
        if caller.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{STOPPED}\n".encode())
            os._exit(INTERRUPTED)
        caller = caller.f_back
    raise KeyboardInterrupt


def _open_closed_streams() -> None:
    """So that no file of a run gets the number of a stream that is closed, as after ``>&-``."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115


if __name__ == "__main__":
    main()
