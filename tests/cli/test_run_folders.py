"""Promise: concurrent runs keep apart: each has its folder, and refuses one that another is still writing to."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pyattn.cli import output, state

FILES = {"model.safetensors", "training.safetensors", "loss.png"}
SMALL = "train --layers 1 --heads 1 --width 8 --context 16 --batch 2 --steps 4 --eval-every 2 --sample 4 --threads 1"


def started(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """A ``pyattn`` process with ``folder`` as its working directory."""
    return subprocess.Popen(
        [sys.executable, "-m", "pyattn", *options],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def results(processes: "list[subprocess.Popen[str]]") -> list[tuple[int, str]]:
    """Exit codes and stderr of the processes."""
    shown = [process.communicate(timeout=600)[1] for process in processes]
    return [(process.returncode, err) for process, err in zip(processes, shown, strict=True)]


def test_runs_of_one_moment_have_folders_of_their_own(tmp_path, story):
    options = [*SMALL.split(), "--data", str(story)]
    ended = results([started(tmp_path, *options, "--seed", str(seed)) for seed in range(3)])
    assert [code for code, _ in ended] == [0, 0, 0], ended
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    assert all({path.name for path in folder.iterdir()} == FILES for folder in folders)
    assert {state.load(folder).options.seed for folder in folders} == {0, 1, 2}


def test_a_second_of_one_name_is_another(tmp_path, monkeypatch):
    class Noon:
        @staticmethod
        def now():
            return Noon()

        def strftime(self, form):
            return "noon"

    monkeypatch.setattr(output.datetime, "datetime", Noon)
    assert [output.new_folder(tmp_path / "runs").name for _ in range(3)] == ["noon", "noon-2", "noon-3"]


def test_a_folder_is_held_by_one_live_run(tmp_path, story, refusal):
    """The process of the first run is stopped, not ended, while others request its folder; then it is killed."""
    folder = tmp_path / "held"
    first = started(tmp_path, *SMALL.split(), "--data", str(story), "--steps", "1000000", "--out", str(folder))
    while not (folder / state.STATE).exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.send_signal(signal.SIGSTOP)
    before = (folder / state.STATE).read_bytes()
    for options in (
        ["train", "--resume", str(folder)],
        [*SMALL.split(), "--data", str(story), "--out", str(folder), "--overwrite"],
        ["bench", "--out", str(folder)],
    ):
        asked = "--resume" if "--resume" in options else "--out"
        assert refusal(*options) == f"{asked} must be a folder that no other run is writing to, got {folder}"
    assert (folder / state.STATE).read_bytes() == before
    first.kill()
    first.communicate()
    with output.held("--resume", folder, (), overwrite=True):
        pass


def test_a_folder_that_its_holder_removed_is_made_again(tmp_path, monkeypatch):
    folder, lock = tmp_path / "run", fcntl.flock
    folder.mkdir()

    def late(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", lock)
        folder.rmdir()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with output.held("--out", folder, ("a",), overwrite=False):
        output.write(folder / "a", b"written")
    assert (folder / "a").read_bytes() == b"written"


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def refused(descriptor, how):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", refused)
    with output.held("--out", tmp_path / "run", ("a",), overwrite=False):
        output.write(tmp_path / "run" / "a", b"written")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]
