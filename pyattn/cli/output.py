"""The folder that a command writes into."""

from collections.abc import Sequence
from pathlib import Path

from pyattn.cli import InputError


def make_folder(folder: Path, files: Sequence[str], overwrite: bool) -> Path:
    """Create ``folder`` and check that it can be written to, before the work whose results it is for.

    Raises:
        InputError: one of ``files`` exists and ``overwrite`` is false, or the folder can't be written to.
    """
    try:
        there = [name for name in files if (folder / name).exists()]
        if there and not overwrite:
            got = f"{folder} with {' and '.join(there)}"
            raise InputError("--out must be a new folder, or --overwrite be given", got)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError("--out must be a folder that can be written to", f"{folder} ({error.strerror})") from error
    return folder
