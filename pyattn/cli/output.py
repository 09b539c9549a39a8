"""Writing results: one run at a time holds a folder, and a file is replaced completely or not at all."""

import datetime
import errno
import fcntl
import itertools
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pyattn.cli import InputError

SHARDS = re.compile(r"shards-\d+-[0-9a-f]{8}")
"""Names of the folders that ranks write; one that the state does not name is unfinished or superseded."""


def _beside(path: Path) -> Path:
    """A unique name in the folder of ``path``; a file of that name is unfinished."""
    return path.with_name(f".{secrets.token_hex(8)}.unfinished")


def _in_place(path: Path) -> bool:
    """Whether ``path`` is a device or a pipe, which is written to directly: a rename would replace it by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write(path: Path, content: bytes) -> None:
    """Write the file ``path``, with the umask's mode; a failure keeps an earlier file and leaves nothing beside it.

    Raises:
        InputError: the disk is full, or the system gives another reason.
    """
    try:
        if _in_place(path):
            path.write_bytes(content)
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        unfinished = _beside(target)
        try:
            with unfinished.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # some file systems report a full disk only now
            unfinished.replace(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        earlier = "; the earlier file is kept" if path.is_file() else ""
        raise InputError("a file must fit its disk whole", f"{path} ({error.strerror}{earlier})") from error


def _check_file(path: Path) -> None:
    """Raise OSError where :func:`write` can't write ``path`` at all."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if _in_place(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    probe = _beside(Path(os.path.realpath(path)))
    probe.touch(exist_ok=False)
    probe.unlink()


def remove_shards(run: Path, but: str = "") -> None:
    """Remove the folders in ``run`` that ranks wrote, all ``but`` this one."""
    for path in run.iterdir():
        if SHARDS.fullmatch(path.name) and path.name != but:
            shutil.rmtree(path, ignore_errors=True)


def check_file(option: str, path: Path) -> None:
    """Raise InputError if ``path`` can't be written, before the work starts whose result it will hold."""
    try:
        _check_file(path)
    except OSError as error:
        raise InputError(f"{option} must be a file that can be written to", f"{path} ({error.strerror})") from error


def new_folder(parent: Path) -> Path:
    """Make a new folder in ``parent``, named by the time, with a number appended if the name is taken.

    Raises:
        InputError: no folder can be made.
    """
    name = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = parent / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise InputError("--out must be a folder that can be written to", f"{parent} ({error.strerror})") from error
    return folder


def _lock(option: str, folder: Path) -> int:
    """Locks ``folder``, creating it if missing, until the returned descriptor is closed.

    The system releases the lock however the process ends. A file system that
    can't lock folders (NFS) leaves it unlocked.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(f"{option} must be a folder that no other run is writing to", folder) from error
        except OSError:
            return descriptor
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)  # its last holder has removed the folder


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty
        folder.rmdir()


@contextmanager
def held(option: str, folder: Path, files: Sequence[str], overwrite: bool, made: bool = False) -> Iterator[None]:
    """Holds ``folder``, creating it if missing, so only this process writes ``files`` there.

    A folder that this call creates, or that is said to be ``made`` for it, is removed again if it ends up empty.

    Raises:
        InputError: another run holds it, one of ``files`` exists and ``overwrite`` is false, or it can't be written to.
    """
    with ExitStack() as stack:
        try:
            made = made or not folder.exists()
            stack.callback(os.close, _lock(option, folder))
            if made:
                stack.callback(_remove_empty, folder)
            there = [name for name in files if (folder / name).exists()]
            if there and not overwrite:
                got = f"{folder} with {' and '.join(there)}"
                raise InputError(f"{option} must be a new folder, or --overwrite be given", got)
            for name in files:
                _check_file(folder / name)
        except OSError as error:
            got = f"{folder} ({error.strerror})"
            raise InputError(f"{option} must be a folder that can be written to", got) from error
        yield
