"""The commands ``pyattn info``, ``train``, ``generate``, ``bench``, ``profile``, ``show``; also ``python -m pyattn``.

Each command is a module here with ``run(argv) -> exit code``. It is imported only when it is called, so a command needs
only the extras it uses itself, and ``import pyattn`` needs none.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from pyattn import _C, __version__

COMMANDS = {
    "info": "what this build is, and what it runs on",
    "train": "train a small GPT on text, and measure its attention",
    "generate": "let a trained model go on with a text",
    "bench": "time and memory of attention and modules, beside PyTorch's",
    "profile": "where the time inside the kernels goes",
    "show": "what a trained model's heads look at, as a picture",
}
EXTRAS = {"matplotlib", "numpy", "safetensors", "tqdm"}


class InputError(ValueError):
    """Invalid user input; the command line shows its message without a traceback."""

    def __init__(self, rule: str, got: object) -> None:
        super().__init__(f"pyattn: {rule}, got {got}")


def check_instruction_set() -> None:
    """Raise InputError where PYATTN_ISA names an instruction set that this CPU or build does not have."""
    try:
        _C.active_isa()
    except ValueError as error:
        rule, _, got = str(error).removeprefix("pyattn: ").partition(", got ")
        raise InputError(f"PYATTN_ISA: {rule}", got) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own).

    Returns:
        0 for success, 1 where training diverged or a result failed its check, 2 for bad input or a missing extra,
        130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="pyattn",
        description="Exact native attention for PyTorch.",
        epilog="\n".join(f"{name:10}{purpose}" for name, purpose in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pyattn {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help="see below; each has its own --help")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the command")
    chosen = parser.parse_args(argv)
    if chosen.command is None:
        parser.print_help()
        return 0

    try:
        check_instruction_set()
        command = importlib.import_module(f"pyattn.cli.{chosen.command}")
        return int(command.run(chosen.options))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        if missing.name not in EXTRAS:
            raise
        mend = "pip install 'pyattn[cli]' (in a checkout: pip install -e '.[cli]')"
        print(f"pyattn: {chosen.command} needs {missing.name}, which is not installed: {mend}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells report it
