"""Promise: the commands follow their options, and refuse in one sentence what they can't do."""

import re
from pathlib import Path

import pytest
import torch
from support.fresh import python

from pyattn import _C, __version__
from pyattn.cli import COMMANDS, info, main

STANDS_IN = {"cpu": "cpu", "cuda": "meta"}


# Bad input: exit code 2 and one sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps -1", "--steps must be at least 1, got -1"),
        ("--seed -1", "--seed must lie in [0, 2^64), got -1"),
        ("--lr nan", "--lr must be between 1.2e-38 and 1e+37, a number of float32, got nan"),
        ("--temperature -1", "--temperature must be 0 or between 1.2e-38 and 3.4e+38, a number of float32, got -1.0"),
        ("--layers 0", "layers must be at least 1, got 0"),
        ("--heads 3", "width must be a multiple of heads, got 128 and 3"),
        ("--dropout 1", "dropout must be at least 0 and below 1, got 1.0"),
        ("--context 5000", "must be longer than the context, got 155 of 1550 bytes and context 5000"),
        ("--data nowhere", "data must be an existing file or folder, got nowhere"),
        ("--context 16 --out /dev/null/run", "--out must be a folder that can be written to, got /dev/null/run"),
        (f"--context 16 --out {'n' * 300}", "--out must be a folder that can be written to, got nnn"),
    ],
)
def test_bad_values_are_one_sentence(tmp_path, refusal, options, message):
    (tmp_path / "short").write_text("No bottle of beer on the wall. " * 50)
    data = "" if "--data" in options else f"--data {tmp_path / 'short'}"
    out = "" if "--out" in options else f"--out {tmp_path / 'run'}"
    assert message in refusal(f"train {options} {data} {out}")


def test_unknown_options_and_commands_exit_with_2(capsys):
    for argv in (["train", "--steps", "many"], ["train", "--attention", "none"], ["sing"]):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2
        assert "usage: pyattn" in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: pyattn")
    folder = Path(shown.out.splitlines()[-1].partition(" has README.md")[0])
    assert all((folder / page / "README.md").exists() for page in (".", "nn", "adapters", "cli"))
    assert all(purpose in shown.out for purpose in COMMANDS.values())
    assert shown.err == ""


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"pyattn {__version__}\n"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("show", "generate")])
@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (False, f"needs a GPU that this torch can use, got torch {torch.__version__} without one"),
        (True, "needs a build of pyattn with CUDA kernels (PYATTN_CUDA=ON), got a build without"),
    ],
)
def test_cuda_without_a_gpu_or_kernels_is_one_sentence(monkeypatch, refusal, command, gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_C, "cuda_archs", [])
    assert refusal(f"{command} --device cuda") == f"--device cuda {message}"


# Information


def facts_of(shown: str) -> dict[str, str]:
    """The facts, and that each line fits a terminal; a line that begins with spaces continues the one before."""
    assert max(map(len, shown.splitlines())) <= 80
    return dict(re.split("  +", line, maxsplit=1) for line in re.sub(r"\n +", " ", shown).splitlines())


def test_info_names_gpus_and_what_kernels_are_for(monkeypatch, shown):
    monkeypatch.setattr(_C, "cuda_archs", ["80", "90"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["Small GPU", "Large GPU"].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 6), (12, 0)].__getitem__)
    facts = facts_of(shown("info").out)
    assert facts["CUDA kernels"] == "sm_80 sm_90"
    assert facts["GPU"] == "Small GPU (sm_86), Large GPU (sm_120)"


@pytest.mark.usefixtures("small_gpu")
def test_info_asks_the_device_for_its_dtypes(monkeypatch, shown):
    def attention(q, *_):
        if (q.device.type, q.dtype) == ("meta", torch.float64):
            raise TypeError

    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *size, device, **options: ones(*size, device=STANDS_IN[device], **options)
    )
    monkeypatch.setattr(info, "attention", attention)
    for device, dtypes in (("cuda", "float32 float16 bfloat16"), ("cpu", "float32 float64 float16 bfloat16")):
        assert facts_of(shown(f"info --device {device}").out)["dtypes"] == dtypes


def test_info_says_what_a_cpu_without_avx2_loses(monkeypatch, shown):
    assert ("lost" in facts_of(shown("info").out)) == (info.isas() == ["scalar"])
    monkeypatch.setattr(info, "isas", lambda: ["scalar"])
    assert facts_of(shown("info").out)["lost"].startswith("speed: scalar code takes")


# Fresh processes


def test_info_as_a_module():
    done = python("-m", "pyattn", "info")
    assert (done.returncode, done.stderr) == (0, "")
    facts = facts_of(done.stdout)
    assert facts["ISA active"] in facts["ISAs available"].split()
    assert set(facts["ISAs available"].split()) <= set(facts["ISAs compiled"].split())
    assert torch.__version__ in facts["torch"]
    assert "float32" in facts["dtypes"].split()


PACKAGES = {"matplotlib", "numpy", "safetensors", "tqdm"}
WITHOUT = """
import importlib, sys
sys.modules |= dict.fromkeys({missing})
from pyattn.cli import main
if home := {{"bench": "bench.comparisons", "profile": "profile.command"}}.get(sys.argv[1]):
    importlib.import_module("pyattn.cli." + home).SECONDS = 0.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("command", "needed", "code"),
    [
        ("info", set(), 0),
        ("train --steps 0", PACKAGES, 2),
        ("generate nowhere", {"safetensors", "tqdm"}, 2),
        ("bench --only functions --shapes 1x1x9x4 --dtype float32 --threads 1", {"tqdm"}, 0),
        ("profile --shapes 1x1x9x4 --forward --threads 1", set(), 0),
        ("show nowhere", {"matplotlib", "numpy", "safetensors"}, 2),
    ],
)
def test_a_command_runs_without_the_packages_that_it_does_not_need(command, needed, code):
    done = python("-c", WITHOUT.format(missing=PACKAGES - needed), *command.split())
    assert "not installed" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("train", "tqdm"),
        ("generate run", "safetensors"),
        ("show run", "numpy"),
        ("show run", "matplotlib"),
        ("profile --shapes 1x1x9x4 --roofline roofline.png", "matplotlib"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(command, package):
    done = python("-c", WITHOUT.format(missing={package}), *command.split())
    message = f"pyattn: {command.split()[0]} needs {package}, which is not installed: pip install {package}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_the_package_needs_no_extra():
    done = python("-c", "import sys, pyattn; print({'pyattn.cli', 'matplotlib', 'safetensors'} & set(sys.modules))")
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("command", ["info", "train"])
def test_an_instruction_set_that_is_not_there_is_one_sentence(command):
    done = python("-m", "pyattn", command, PYATTN_ISA="abacus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pyattn: ")
    assert "PYATTN_ISA" in done.stderr
    assert done.stderr.endswith("got 'abacus'\n")
    assert done.stderr.count("\n") == 1
