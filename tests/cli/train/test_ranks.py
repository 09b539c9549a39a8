"""Promise: ranks share a training, whose losses, weights and checkpoints are those of one process."""

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import train, written_story
from support import trainings
from support.ranks.pool import Pool, close

from pyattn.cli import main
from pyattn.cli.train import resume

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

RANKS = 4
SHAPE = "--layers 2 --heads 4 --width 16 --context 15 --batch 3 --steps 6 --eval-every 3 --sample 5 --threads 1"
DROPPED = "--dropout 0.2 --window 9 0 --sinks"


@cache
def pool() -> Pool:
    return Pool((RANKS,), module="support.trainings")


@pytest.fixture(scope="module", autouse=True)
def pool_that_ends():
    yield
    close(pool)


def mesh(data: int, context: int, tensor: int) -> list[str]:
    return f"--data-parallel {data} --context-parallel {context} --tensor-parallel {tensor}".split()


def on_ranks(*options: Any, disturb: tuple[Any, ...] = ()) -> list[tuple[int, str, str]]:
    """``pyattn train`` on every rank of the pool."""
    return pool().run(RANKS, trainings.train, [str(option) for option in options], *disturb)


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    parent = tmp_path_factory.mktemp("ranks")
    written_story(parent)
    return parent


@pytest.fixture(scope="module")
def given(parent):
    return [*SHAPE.split(), "--data", parent / "story.txt"]


@pytest.fixture(scope="module")
def alone(parent):
    """The state after a training in one process, by its options."""

    @cache
    def run(options: str) -> resume.State:
        code, folder = train(parent / "story.txt", parent, *SHAPE.split(), *options.split(), out=f"alone {options}")
        assert code == 0
        return resume.load(folder)

    return run


@pytest.fixture(scope="module")
def shared(given, parent):
    """The folder of a training on a mesh, and what each rank printed."""

    @cache
    def run(sizes: tuple[int, int, int], options: str) -> tuple[Path, list[tuple[int, str, str]]]:
        folder = parent / f"shared {sizes} {options}"
        return folder, on_ranks(*given, *options.split(), *mesh(*sizes), "--out", folder)

    return run


def assert_alike(found: resume.State, expected: resume.State) -> None:
    """Losses agree to the rounding of ten sums; generators, to the bit; weights in float32, to a hundredth of a step.

    AdamW divides gradients by their size, even those that are all rounding.
    """
    rounded = expected.options.dtype == "bfloat16"
    rounding = 2**-9 if rounded else 10 * 2**-24
    for name in (name for name in expected.tensors if name.startswith("model.") and not rounded):
        torch.testing.assert_close(found.tensors[name], expected.tensors[name], rtol=0, atol=5e-3 / 100)
    for kind in ("losses.train", "losses.validation"):
        torch.testing.assert_close(found.tensors[kind], expected.tensors[kind], rtol=rounding, atol=0)
    drawn = [name for name in expected.tensors if name.startswith("generator.")]
    assert all(torch.equal(found.tensors[name], expected.tensors[name]) for name in drawn)


# The losses of one process

FULL = (2, 2, 1), f"{DROPPED} --alibi"


@pytest.mark.parametrize(
    ("sizes", "options"),
    [((4, 1, 1), DROPPED), FULL, ((1, 2, 2), DROPPED), ((2, 1, 2), "--dtype bfloat16")],
)
def test_losses(shared, alone, sizes, options):
    """Three windows for four ranks, and fifteen positions: some ranks have more than others, some none."""
    folder, outcomes = shared(sizes, options)
    assert [(code, bool(out)) for code, out, _ in outcomes] == [(0, True), *[(0, False)] * (RANKS - 1)], outcomes
    assert re.findall(r"^step +(\d)", outcomes[0][1], re.MULTILINE) == ["0", "3"]
    assert "loads back, same validation loss" in outcomes[0][1]
    assert_alike(resume.load(folder), alone(options))
    assert (folder / "loss.png").exists()


# Checkpoints


def test_resume(given, parent, shared, alone):
    """To the bit on the same ranks; on others, and in one process, as another summation order rounds."""
    sizes, options = FULL
    cut = parent / "cut"
    outcomes = on_ranks(*given, *options.split(), *mesh(*sizes), "--out", cut, disturb=(trainings.interrupted, 4))
    assert [code for code, _, _ in outcomes] == [130] * RANKS
    assert outcomes[0][1].endswith(f"stopped    by Ctrl-C; --resume {cut} continues from the last validation\n")
    again, fewer, other = (Path(shutil.copytree(cut, parent / name)) for name in ("again", "fewer", "other"))
    for folder, resumed in ((again, mesh(*sizes)), (other, mesh(1, 2, 2))):
        outcomes = on_ranks("--resume", folder, *resumed)
        assert "resumed    after 3 of 6 steps" in outcomes[0][1], outcomes
    assert main(["train", "--resume", str(fewer)]) == 0
    whole, same = resume.load(shared(*FULL)[0]), resume.load(again)
    assert all(torch.equal(x, same.tensors[name]) for name, x in whole.tensors.items())
    assert [path.name for path in fewer.iterdir() if path.is_dir()] == []
    for folder in (fewer, other):
        assert_alike(resume.load(folder), alone(options))


def test_a_full_disk_leaves_the_checkpoint_before(given, parent):
    """The disk of rank 1 is full when the third checkpoint is written."""
    folder = parent / "full"
    outcomes = on_ranks(*given, *mesh(1, 2, 2), "--out", folder, disturb=(trainings.without_room, 1, 2))
    assert [code for code, _, _ in outcomes] == [2] * RANKS
    (said,) = [err for _, _, err in outcomes if err]
    kept = r"\(rank 1: .*; the earlier checkpoint is kept\)\n"
    assert re.fullmatch(rf"pyattn: a checkpoint must fit its disk whole, got .*shards-6-\w{{8}} {kept}", said)
    assert resume.load(folder).steps == 3
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("edit", ["missing", "cut", "name", "claim"])
def test_edited_checkpoints(shared, tmp_path, refusal, edit):
    folder = Path(shutil.copytree(shared(*FULL)[0], tmp_path / "run"))
    (shards,) = [path for path in folder.iterdir() if path.is_dir()]
    file = sorted(shards.iterdir())[0]
    if edit == "missing":
        file.unlink()
    elif edit == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif edit == "claim":
        file.write_bytes(file.read_bytes().replace(b"[0, 0", b"[9, 0"))
    else:
        path = folder / resume.STATE
        path.write_bytes(path.read_bytes().replace(b"shards-6-", b"../../6-x"))
    assert refusal(f"train --resume {folder}").startswith(f"{resume.RULE}, got {folder / resume.STATE} (")


# Refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--data-parallel 3",
            "--data-parallel, --context-parallel, --tensor-parallel must multiply to the number of ranks that torchrun "
            "starts, got 3 x 1 x 1 = 3 and 4",
        ),
        ("--tensor-parallel 4 --heads 2", "--heads must be a multiple of --tensor-parallel, got 2 and 4"),
        (
            "--context-parallel 4 --attention sdpa",
            "--context-parallel, and --dropout on several ranks, need --attention pyattn, got sdpa",
        ),
        (
            "--data-parallel 4 --attention reference --dropout 0.1",
            "--context-parallel, and --dropout on several ranks, need --attention pyattn, got reference",
        ),
        ("--data-parallel 4 --seed {rank}", "seed must be the same on all ranks, got 0 on rank 0 and 1 on rank 1"),
    ],
)
def test_options(given, tmp_path, options, said):
    outcomes = on_ranks(*given, *options.split(), "--out", tmp_path / "run")
    assert [code for code, _, _ in outcomes] == [2] * RANKS, outcomes
    assert [err for _, _, err in outcomes if err] == [f"pyattn: {said}\n"]
    assert not (tmp_path / "run").exists()


def test_an_error_of_one_rank(given, tmp_path):
    story = Path(given[-1])
    for rank in (0, 1, 3):
        (tmp_path / f"{rank}").write_bytes(story.read_bytes())
    outcomes = on_ranks(*given, "--data-parallel", "4", "--data", tmp_path / "{rank}")
    assert [code for code, _, _ in outcomes] == [2] * RANKS
    (said,) = [err for _, _, err in outcomes if err]
    assert said.endswith(f"data must be an existing file or folder, got {tmp_path / '2'}\n")


def test_one_process(refusal):
    rule = "--data-parallel, --context-parallel, --tensor-parallel must multiply to the number of ranks that torchrun"
    assert refusal("train --data-parallel 2") == f"{rule} starts, got 2 x 1 x 1 = 2 and 1"
