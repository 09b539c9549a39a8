"""Promise: concurrent runs keep apart: each has its folder, and refuses one that another is still writing to."""

import errno
import fcntl
import os
import signal
from types import SimpleNamespace

from support.fresh import python

from pyattn.cli import output
from pyattn.cli.train import command as train
from pyattn.cli.train import resume

FILES = {"model.safetensors", "training.safetensors", "loss.png"}
SMALL = "train --layers 1 --heads 1 --width 8 --context 16 --batch 2 --steps 4 --eval-every 2 --sample 4 --threads 1"


def test_runs_of_one_moment_have_folders_of_their_own(tmp_path, monkeypatch, story, shown):
    monkeypatch.chdir(tmp_path)
    noon = SimpleNamespace(now=lambda: SimpleNamespace(strftime=lambda form: "noon"))
    monkeypatch.setattr(output.datetime, "datetime", noon)
    for seed in "012":
        shown(f"{SMALL} --data {story} --seed {seed}")
    for seed, name in enumerate(("noon", "noon-2", "noon-3")):
        folder = tmp_path / "runs" / name
        assert {path.name for path in folder.iterdir()} == FILES
        assert resume.load(folder).options.seed == seed


def test_a_folder_is_held_while_its_run_trains(trained, story, monkeypatch, shown, refusal):
    """Requests come as training begins, and leave the files as they are."""
    new = f"{SMALL} --data {story} --out {trained} --overwrite"
    asked, fit = [], train.fit

    def watched(training, batches, keep):
        monkeypatch.setattr(train, "fit", fit)
        for option, command in ("resume", f"train --resume {trained}"), ("out", new), ("out", f"bench --out {trained}"):
            message = f"--{option} must be a folder that no other run is writing to, got {trained}"
            asked.append(refusal(command) == message)
        assert (trained / resume.STATE).read_bytes() == before
        fit(training, batches, keep)

    for command in (f"train --resume {trained} --steps 9", new):
        monkeypatch.setattr(train, "fit", watched)
        before = (trained / resume.STATE).read_bytes()
        shown(command)
    assert asked == [True] * 6


def test_a_run_that_is_killed_holds_its_folder_no_longer(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from pyattn.cli import output
with output.held("--out", Path(sys.argv[1]), (), overwrite=True):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python("-c", code, str(tmp_path)).returncode == -signal.SIGKILL
    with output.held("--resume", tmp_path, (), overwrite=True):
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
