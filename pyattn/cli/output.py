"""Where commands write: a folder is held by one run at a time, a file is replaced whole or not at all."""

import datetime
import errno
import fcntl
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pyattn.cli import InputError


def _beside(path: Path) -> Path:
    """A name that no other process chooses, in the folder of ``path``; a file by it is not finished."""
    return path.with_name(f".{secrets.token_hex(8)}.unfinished")


def _in_place(path: Path) -> bool:
    """Whether ``path`` is a device or a pipe, which is written to: a rename would replace it by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write(path: Path, content: bytes) -> None:
    """Write the file ``path``, whose mode follows the umask, or leave an earlier one as it is and nothing beside it.

    Raises:
        InputError: the disk is full, or another reason of the system.
    """
    try:
        if _in_place(path):
            path.write_bytes(content)
            return
        target = Path(os.path.realpath(path))  # a link stays one
        unfinished = _beside(target)
        try:
            with unfinished.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # some file systems tell only now that the disk is full
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


def check_file(option: str, path: Path) -> None:
    """Raise InputError where ``path`` can't be written, before the work whose result it is for."""
    try:
        _check_file(path)
    except OSError as error:
        raise InputError(f"{option} must be a file that can be written to", f"{path} ({error.strerror})") from error


def new_folder(parent: Path) -> Path:
    """A folder in ``parent`` that this call alone made, named by the time, and by a number where names meet.

    Raises:
        InputError: none can be made.
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
    """Locks ``folder``, made where it is missing, as long as the returned descriptor is open.

    The system releases the lock however a process ends. A file system that can't lock folders (NFS) leaves it unlocked.
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
    """Holds ``folder``, made where it is missing, for ``files`` of this process alone.

    A folder that this call made, or that is said to be ``made`` for it, is removed again if it is left empty.

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
