"""Promise: a file is written completely or not at all; if it can't be written, a command says so before its work."""

import contextlib
import errno
import os
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fresh import python

from pyattn.cli import InputError, checkpoint, output, show
from pyattn.cli.bench import command as bench
from pyattn.cli.profile import command as profile


def test_names_of_unfinished_files_are_unique(tmp_path, monkeypatch):
    """A write inside a write of the same file: both are complete, and the one that ends last remains."""
    met, sync = [], os.fsync

    def inside(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        output.write(tmp_path / "a", b"inner")
        met.extend(path.name for path in tmp_path.iterdir())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", inside)
    output.write(tmp_path / "a", b"outer")
    assert len(met) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"outer"


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_mode_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        output.write(tmp_path / "a", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


# A full disk


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """Limits every file of this process to ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "command",
    [
        "train --resume {run} --steps 9",
        "show {run} --text ab",
        "profile --shapes 1x1x9x4 --forward --threads 1 --trace {run}/t.json",
        "bench --out {run}",
    ],
)
def test_no_room_on_the_disk_is_one_sentence(trained, monkeypatch, shown, command):
    """The earlier files stay as they are, to the byte, so the run can be resumed; nothing else is left."""
    monkeypatch.setattr(bench, "comparisons", lambda options, peaks: {})
    monkeypatch.setattr(bench, "measured_peaks", lambda dtypes, threads: {})
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    with room(100):
        said = shown(command.format(run=trained), 2).err.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before
    assert said.startswith("pyattn: ")
    assert "File too large" in said or "torch must be able to write its trace for --trace" in said
    assert ("the earlier file is kept" in said) == command.startswith("train")
    shown(f"train --resume {trained} --steps 9")


def test_a_first_write_without_room_leaves_no_folder(train_on):
    with room(100):
        code, folder = train_on()
    assert (code, folder.exists()) == (2, False)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_late_is_told(tmp_path, monkeypatch, call):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a").write_bytes(b"before")
    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
    with pytest.raises(InputError, match=r"a \(No space left on device; the earlier file is kept\)"):
        output.write(tmp_path / "a", b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"before"


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    output.write(tmp_path / "link", b"through")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"through"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    output.write(tmp_path / "pipe", b"past")
    assert os.read(reader, 9) == b"past"
    os.close(reader)
    with pytest.raises(InputError, match=r"/dev/full \(No space left on device\)"):
        output.write(Path("/dev/full"), b"nowhere")
    assert Path("/dev/full").is_char_device()


# Places that can't be written, found before the work


@pytest.mark.parametrize("place", ["{folder}", "{folder}/missing/file", "/dev/null/file", f"{{folder}}/{'n' * 300}"])
@pytest.mark.parametrize("command", ["show {run} --out", "profile --shapes 1x1x9x4 --trace"])
def test_a_file_that_can_not_be_written(trained, monkeypatch, shown, tmp_path, command, place):
    def works(*arguments):
        raise AssertionError("this is the work")

    monkeypatch.setattr(show, "weights_of", works)
    monkeypatch.setattr(profile, "measure", works)
    said = shown(f"{command} {place}".format(run=trained, folder=tmp_path), 2).err
    assert said.startswith(f"pyattn: {command.split()[-1]} must be a file that can be written to, got ")


def test_a_file_of_the_run_that_is_a_folder(train_on, tmp_path):
    (tmp_path / "run" / checkpoint.MODEL).mkdir(parents=True)
    assert train_on("--overwrite")[0] == 2


TAKEN_BY_NOBODY = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2({writer}, 1)
sys.stdout = open(1, "w")
from pyattn.cli import main
code = main(["info"])
sys.stdout.flush()
sys.exit(code)
"""
"""The output is buffered, and flushed as the interpreter does at its end, which a fork does not have."""


@pytest.mark.parametrize(("writer", "code"), [("os.open('/dev/full', os.O_WRONLY)", 2), ("writer", 141)])
def test_output_that_nobody_takes(writer, code):
    done = python("-c", TAKEN_BY_NOBODY.format(writer=writer))
    assert done.returncode == code
    assert done.stderr.count("\n") == (1 if code == 2 else 0)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_closed(train_on, monkeypatch, stream):
    """Python has None for a descriptor that is closed when it starts, as the shell's >&- closes it."""
    monkeypatch.setattr(sys, stream, None)
    assert train_on()[0] == 0
    assert getattr(sys, stream) is None
