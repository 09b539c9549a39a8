"""The commands ``pyattn info``, ``train``, ``generate``, ``bench``, ``profile``, ``show``; also ``python -m pyattn``.

Each command is a module with ``run(argv) -> exit code``, imported only when it is called. So a command needs only
the extras it uses itself, and ``import pyattn`` needs none.

.. include:: README.md
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from pyattn import __version__, isa
from pyattn.cli.checks import InputError

COMMANDS = {
    "info": "what this build is, and what it runs on",
    "train": "train a small GPT on text, and measure its attention",
    "generate": "let a trained model continue a text",
    "bench": "time and memory of attention and modules, beside PyTorch's",
    "profile": "where the time inside the kernels goes",
    "show": "what a trained model's heads look at, as a picture",
}
PAGES = f"{Path(__file__).parents[1]} has README.md with every task, and pages in nn, adapters and cli."
"""Where a user without a command finds the documentation."""
MODULES = {name: f"{name}.command" for name in ("train", "generate", "bench", "profile")}
"""The modules of commands that have a folder."""
EXTRAS = {"matplotlib", "numpy", "safetensors", "tqdm"}

__all__ = ["COMMANDS", "InputError", "main"]


def said(command: str, error: Exception) -> str | None:
    """One sentence about what went wrong in ``command``; None if the error is a bug in pyattn."""
    if isinstance(error, ValueError) and str(error).startswith("pyattn: "):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in EXTRAS:
        return f"pyattn: {command} needs {package}, which is not installed: pip install {package}"
    if isinstance(error, OSError):
        return f"pyattn: {command} must be able to read and write, got {error}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        return f"pyattn: {command} must fit the memory that is free, got {asked[1] if asked else 'more'}"
    return None


@contextmanager
def open_streams() -> Iterator[None]:
    """Gives a closed stream (``>&-``), which Python has as None, a file to write to; progress bars need one."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                stack.enter_context(redirect(stack.enter_context(open(os.devnull, "w"))))
        yield


def run(command: str, options: Sequence[str]) -> int:
    """Run one command and flush what it printed. Returns the exit code."""
    try:
        isa()  # raises where PYATTN_ISA names an instruction set that this CPU or build does not have
        code = int(importlib.import_module(f"pyattn.cli.{MODULES.get(command, command)}").run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        code = 141  # 128 + SIGPIPE, as shells report it
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT
    except Exception as error:
        sentence = said(command, error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        code = 2
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would try again at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own).

    Returns:
        0 for success, 1 if training diverged or a result failed its check, 2 for bad input, a missing package or a full
        disk, 130 after Ctrl-C, 141 if the reader of the output has gone.
    """
    parser = argparse.ArgumentParser(
        prog="pyattn",
        description="Exact native attention for PyTorch.",
        epilog="\n".join((*(f"{name:10}{purpose}" for name, purpose in COMMANDS.items()), "", PAGES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pyattn {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help="see below; each has its own --help")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the command")
    chosen = parser.parse_args(argv)
    if chosen.command is None:
        parser.print_help()
        return 0
    with open_streams():
        return run(chosen.command, chosen.options)
