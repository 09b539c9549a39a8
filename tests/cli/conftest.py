import contextlib
import functools
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyattn
from pyattn import _C
from pyattn.cli import chart, contention, main, output, timing
from pyattn.cli.bench import command as bench
from pyattn.cli.bench import comparisons, table
from pyattn.cli.profile import command as profile
from pyattn.cli.profile import report
from pyattn.cli.train import command as training


def written_story(folder: Path) -> Path:
    """A file with enough text to train a small model."""
    path = folder / "story.txt"
    path.write_text("".join(f"{n} green bottles, hänging on the wall.\n" for n in range(200)), encoding="utf-8")
    return path


def train(story: Path, parent: Path, *options: str, out: str = "run") -> tuple[int, Path]:
    """``pyattn train`` of a small model, context 16, 6 steps by default: the exit code and the folder."""
    folder = parent / out
    shape = "--layers 2 --heads 2 --width 16 --context 16 --batch 4 --steps 6 --eval-every 3 --sample 20"
    return main(["train", *shape.split(), "--data", str(story), "--out", str(folder), *options]), folder


@pytest.fixture(autouse=True)
def settings_kept():
    """Restores what commands set."""
    isa, threads = pyattn.isa(), torch.get_num_threads()
    yield
    pyattn.set_isa(isa)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Measurements of three rounds, and trainings that spend their time on steps: no curve is drawn."""
    for module in (profile, report, comparisons):
        monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "SPIN", timing.SPIN / 10)
    monkeypatch.setattr(training, "VALIDATION_WINDOWS", 8)
    monkeypatch.setattr(training, "COMPARED_BATCHES", 2)
    monkeypatch.setattr(chart, "draw", lambda losses, unigram_loss, title, path: output.write(path, b""))


class Clocks:
    """Three clocks that calls advance: wall, thread and process; other threads spin for `spinning` seconds yet."""

    def __init__(self) -> None:
        self.wall = self.thread = self.process = self.spinning = 0.0

    def sleep(self, seconds: float) -> None:
        spun = min(seconds, self.spinning)
        self.wall, self.process, self.spinning = self.wall + seconds, self.process + spun, self.spinning - spun

    def call(self, wall: float, thread: float, process: float) -> None:
        self.wall, self.thread, self.process = self.wall + wall, self.thread + thread, self.process + process


@pytest.fixture
def clocks(monkeypatch):
    """The time, which only a test's calls advance."""
    clocks = Clocks()
    time = SimpleNamespace(
        perf_counter=lambda: clocks.wall,
        thread_time=lambda: clocks.thread,
        process_time=lambda: clocks.process,
        sleep=lambda seconds: clocks.sleep(seconds),
    )
    for module in (bench, contention, table, timing):
        monkeypatch.setattr(module, "time", time)
    return clocks


@pytest.fixture
def small_gpu(monkeypatch):
    """torch finds a GPU, and this build has kernels for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Small GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(_C, "cuda_archs", ["90"])


@pytest.fixture
def story(tmp_path):
    return written_story(tmp_path)


@pytest.fixture
def train_on(story, tmp_path):
    return functools.partial(train, story, tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Trains once with these options for all tests that only read the folder, and keeps the output beside it."""

    @functools.cache
    def run(*options):
        parent = tmp_path_factory.mktemp("finished")
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            code, folder = train(written_story(parent), parent, *options)
        assert code == 0
        return folder, shown.getvalue()

    return run


@pytest.fixture
def trained(finished, tmp_path):
    """The folder of a finished training of 6 steps, which this test may change."""
    return Path(shutil.copytree(finished()[0], tmp_path / "run"))


@pytest.fixture
def shown(capsys):
    """The output of a command, a line without quotes or a list of words, that ends with this code."""

    def run(command, code=0):
        capsys.readouterr()
        assert main(command.split() if isinstance(command, str) else command) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def refusal(shown):
    """The one sentence, without the library's name, with which a command refuses before it starts work."""

    def run(command):
        out, err = shown(command, 2)
        assert (out, err[:8], err.count("\n"), err[-1]) == ("", "pyattn: ", 1, "\n")
        return err[8:-1]

    return run
