"""Promise: under torchrun, a rank that ends costs the steps since the last checkpoint and nothing else."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyattn.cli.train import resume

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
]

SHAPE = "--layers 2 --heads 4 --width 32 --context 64 --batch 4 --eval-every 5 --sample 5 --dropout 0.2"
MESH = ["--data-parallel", "2", "--context-parallel", "2"]
TENSORS = ["--context-parallel", "1", "--tensor-parallel", "2"]
PATIENCE = 900
"""Seconds after which a training counts as hanging; four ranks on two cores that others use have taken 170."""

DIES_WHILE_WRITING = """
import os, signal, sys
from pyattn.cli import main
from pyattn.cli.train.checkpoint_shards import HuggingFaceStorageWriter
ahead, write = iter(range(2)), HuggingFaceStorageWriter.write_data
def die(self, plan, planner):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and next(ahead, None) is None:
        (self.path / "cut").write_bytes(b"unfinished")
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, plan, planner)
HuggingFaceStorageWriter.write_data = die
sys.exit(main())
"""


def torchrun(*options: object, script: tuple[str, ...] = ("-m", "pyattn")) -> subprocess.Popen[str]:
    """Starts torchrun with these options before ``{script}`` and after it: those before it end with ``--``."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = f"--master-port={free.getsockname()[1]}"
    cut = options.index("--")
    before, after = options[:cut], options[cut + 1 :]
    return started([sys.executable, "-m", "torch.distributed.run", port, *before, *script, "train", *after])


def started(command: list[object], **environment: str) -> subprocess.Popen[str]:
    """Starts the command in a separate session, so all its processes can be ended."""
    pipe, known = subprocess.PIPE, os.environ | environment
    words = [str(word) for word in command]
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=known)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code and the output; a training that hangs is killed."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def finished(*options: object) -> None:
    """A training on four ranks that nothing disturbs."""
    outcome = ended(torchrun("--nproc-per-node=4", "--", *options))
    assert outcome[0] == 0, outcome


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if "pyattn" in Path(f"/proc/{pid}/cmdline").read_text()]


def same(found: Path, expected: Path) -> bool:
    ours, whole = (resume.load(folder).tensors for folder in (found, expected))
    return ours.keys() == whole.keys() and all(torch.equal(x, ours[name]) for name, x in whole.items())


@pytest.fixture
def given(story) -> list[object]:
    return [*SHAPE.split(), "--data", story, *MESH]


@pytest.mark.parametrize("mesh", [[], TENSORS], ids=["context", "tensor"])
def test_kill_9(given, tmp_path, mesh):
    """A rank is killed after the checkpoint of step 5 or later; the end has the bits of a training without this."""
    options = *given, *mesh, "--steps", "25"
    finished(*options, "--out", tmp_path / "whole")
    cut = tmp_path / "cut"
    process = torchrun("--nproc-per-node=4", "--max-restarts=1", "--", *options, "--out", cut)
    deadline = time.monotonic() + PATIENCE
    while not list(cut.glob("shards-10-*")):  # begun once the checkpoint of step 5 stands
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(workers(process)[2], signal.SIGKILL)
    code, out, err = ended(process)
    assert code == 0, err
    assert out.count("resumed    after ") == 1
    assert "after 0 of" not in out
    assert "Traceback" not in err
    assert same(cut, tmp_path / "whole")


def test_a_rank_that_dies_while_it_writes(given, tmp_path):
    """The third checkpoint, of step 10, is never finished; the restarted ranks begin at the second one."""
    options = *given, "--steps", "15"
    finished(*options, "--out", tmp_path / "whole")
    (tmp_path / "script.py").write_text(DIES_WHILE_WRITING)
    script, cut = (str(tmp_path / "script.py"),), tmp_path / "cut"
    process = torchrun("--nproc-per-node=4", "--max-restarts=0", "--", *options, "--out", cut, script=script)
    code, _, err = ended(process)
    assert code == 1
    assert err.count("pyattn: each rank must live until the training ends, got one that ended before") == 1
    assert resume.load(cut).steps == 5
    assert len(list(cut.glob("shards-*"))) == 2
    shutil.rmtree(cut)
    process = torchrun("--nproc-per-node=4", "--max-restarts=1", "--", *options, "--out", cut, script=script)
    code, out, err = ended(process)
    assert code == 0, err
    assert "resumed    after 5 of 15 steps" in out
    assert same(cut, tmp_path / "whole")
    assert len(list(cut.glob("shards-*"))) == 1


def test_restarts_need_a_folder(given):
    code, _, err = ended(torchrun("--nproc-per-node=4", "--max-restarts=1", "--", *given))
    assert code == 1
    assert "pyattn: --out must be given under --max-restarts, which continues there, got none\n" in err


# Two nodes


END = "pyattn{}"
"""The name of a node's end of the cable."""


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, ...]]]:
    """The commands that run a program in each of two network namespaces, joined by a cable: 10.77.0.1 and .2."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the program ip")
    names = [f"{END.format(number)}-{os.getpid()}" for number in (1, 2)]
    ends = [END.format(number) for number in (1, 2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"needs network namespaces: {error.stderr!r}")
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_two_nodes(given, tmp_path, nodes):
    """torchrun's own rendezvous, two ranks on each node: the bits are those of four ranks on one."""
    options = *given, "--steps", "10"
    finished(*options, "--out", tmp_path / "one")
    command = ["-m", "pyattn", "train", *map(str, options), "--out", str(tmp_path / "two")]
    processes = []
    for number, node in enumerate(nodes, 1):
        # Both namespaces have the name of this machine, by which torchrun and gloo would look for addresses.
        own = f"--local-addr=10.77.0.{number}", f"--rdzv-conf=is_host={int(number == 1)}"
        meet = "--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", "--rdzv-id=pyattn", *own
        launch = *node, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *meet
        processes.append(started([*launch, *command], GLOO_SOCKET_IFNAME=END.format(number)))
    outcomes = [ended(process) for process in processes]
    assert [code for code, _, _ in outcomes] == [0, 0], outcomes
    assert sum("loads back, same validation loss" in out for _, out, _ in outcomes) == 1
    assert same(tmp_path / "two", tmp_path / "one")
