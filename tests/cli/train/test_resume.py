"""Promise: an interrupted training continues to the bit from its last validation; any training can be extended."""

from collections.abc import Callable

import pytest
import torch

from pyattn.cli.checkpoint import MODEL
from pyattn.cli.train import loop, resume


def watch(monkeypatch: pytest.MonkeyPatch, before_step: Callable[[torch.optim.Optimizer], object]) -> None:
    """Calls ``before_step`` in the optimiser: the step's random numbers are already drawn."""
    take_step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (before_step(self), take_step(self, *args))[1])


def interrupt(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C after ``steps`` steps."""
    ahead = iter(range(steps))

    def interrupted(optimizer: torch.optim.Optimizer) -> None:
        if next(ahead, None) is None:
            raise KeyboardInterrupt

    watch(monkeypatch, interrupted)


@pytest.mark.parametrize("cut", [0, 2, 3, 5])
@pytest.mark.parametrize("options", ["--dropout 0.2", "--dropout 0.1 --window 3 0 --sinks --alibi --seed 3"])
def test_it_goes_on_to_the_bit(train_on, finished, monkeypatch, capsys, shown, cut, options):
    """Weights, moments, losses and later draws equal those of an uninterrupted training."""
    whole, report = finished(*options.split())
    with monkeypatch.context() as patch:
        interrupt(patch, cut)
        code, folder = train_on(*options.split(), out="cut")
    assert code == 130
    assert (folder / "loss.png").exists()
    cut_off = capsys.readouterr().out
    for said in (f"after {cut} of 6 steps; --resume {folder} continues", "loads back, same", "losses agree to"):
        assert said in cut_off
    torch.manual_seed(99)
    resumed = shown(f"train --resume {folder}").out
    assert f"resumed    after {cut // 3 * 3} of 6 steps" in resumed
    ends = [text[text.index("sample") :].split("checkpoint")[0] for text in (resumed, report)]
    assert ends[0] == ends[1]
    assert (folder / MODEL).read_bytes() == (whole / MODEL).read_bytes()
    ours, expected = (resume.load(run) for run in (folder, whole))
    assert ours.text == expected.text
    assert ours.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(x, expected.tensors[name]) for name, x in ours.tensors.items())
    assert {name.split(".")[1] for name in ours.tensors if name.startswith("optimizer")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


# More steps than the run was to have


@pytest.mark.parametrize("cut", [None, 4])
def test_a_run_is_extended_to_the_bit_under_a_constant_rate(train_on, monkeypatch, shown, cut):
    """Weights, moments and draws equal those of a run planned with all steps, whether finished or interrupted."""
    monkeypatch.setattr(loop.Recipe, "rate", lambda self, step: self.lr)
    options = "--dropout", "0.2", "--eval-every", "4"
    _, whole = train_on(*options, "--steps", "11", out="whole")
    with monkeypatch.context() as patch:
        if cut is not None:
            interrupt(patch, cut)
        _, folder = train_on(*options)
    resumed = shown(f"train --resume {folder} --steps 11").out
    assert f"resumed    after {6 if cut is None else 4} of 11 steps" in resumed
    assert (folder / MODEL).read_bytes() == (whole / MODEL).read_bytes()
    ours, expected = (resume.load(run) for run in (folder, whole))
    validations = [dict(s.tensors.pop("losses.validation").tolist()) for s in (ours, expected)]
    assert validations[0].items() >= validations[1].items()
    assert ours.options.steps == 11
    assert all(torch.equal(x, expected.tensors[name]) for name, x in ours.tensors.items())


def test_further_steps_have_the_rates_of_a_run_of_so_many(train_on, monkeypatch, shown):
    rates: list[float] = []
    watch(monkeypatch, lambda optimizer: rates.append(optimizer.param_groups[0]["lr"]))
    _, folder = train_on()
    shown(f"train --resume {folder} --steps 15")
    shown(f"train --resume={folder}")
    recipes = [loop.Recipe(steps, 4, 5e-3, 3, torch.float32) for steps in (6, 15)]
    assert rates == [recipes[0].rate(step) for step in range(6)] + [recipes[1].rate(step) for step in range(6, 15)]
    assert rates[6] > rates[5]


def test_steps_that_are_done_already(trained, shown, refusal):
    before = {name: (trained / name).read_bytes() for name in (MODEL, resume.STATE)}
    said = refusal(f"train --resume {trained} --steps 5")
    assert said == "--steps must be at least the 6 steps that are done, got 5"
    assert {name: (trained / name).read_bytes() for name in before} == before
    shown(f"train --resume {trained} --steps 6")
    assert (trained / MODEL).read_bytes() == before[MODEL]


# Refusals


def test_other_options(trained, refusal):
    message = "--resume continues by the options of its run but --steps, leave others out, got --lr"
    assert refusal(f"train --resume {trained} --lr 0.1") == message


def test_another_text(train_on, story, refusal):
    _, folder = train_on()
    story.write_text(story.read_text().replace("green", "brown"))
    message = "--resume needs the text that its run began with, got another one in 1 files of"
    assert message in refusal(f"train --resume {folder}")


@pytest.mark.parametrize("content", [None, b"no safetensors at all", b"\x02\0\0\0\0\0\0\0{}"])
def test_no_state(tmp_path, refusal, content):
    if content is not None:
        (tmp_path / resume.STATE).write_bytes(content)
    message = f"--resume must be a folder that pyattn train wrote, got {tmp_path / resume.STATE}"
    assert refusal(f"train --resume {tmp_path}").startswith(message)


def test_peers_that_have_no_windows(train_on, capsys):
    assert train_on("--attention", "sdpa", "--window", "3", "0")[0] == 2
    assert capsys.readouterr().err == "pyattn: --window, --sinks and --alibi need another --attention, got sdpa\n"
    assert train_on("--window", "-2", "0")[0] == 2
    assert capsys.readouterr().err == "pyattn: --window: each of its two numbers must be at least -1, got -2\n"
    assert train_on("--attention", "reference", "--window", "3", "0", "--sinks", "--alibi")[0] == 0
