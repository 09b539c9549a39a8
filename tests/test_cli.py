"""Promise: the commands do what they say."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib import image
from torch import Tensor

from pyattn import _C
from pyattn.cli import COMMANDS, InputError, checkpoint, info, main, train
from pyattn.cli.compare import rounding_bound
from pyattn.cli.fit import Recipe
from pyattn.cli.gpt import ATTENTIONS, GPT, Config, attend_reference
from pyattn.cli.text import MAX_BYTES, read

CONTEXT = 16
SMALL = Config(layers=2, heads=2, width=16, context=CONTEXT)
STANDS_IN = {"cpu": "cpu", "cuda": "meta"}


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """Text enough to cut windows of CONTEXT from."""
    path = tmp_path / "story.txt"
    path.write_text("".join(f"{n} green bottles, hänging on the wall.\n" for n in range(200)), encoding="utf-8")
    return path


@pytest.fixture
def train_on(story: Path, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Trains a model of SMALL's shape for 6 steps, unless told otherwise. Returns the exit code and the folder."""

    def run(*options: str, out: str = "run") -> tuple[int, Path]:
        folder = tmp_path / out
        shape = f"--layers 2 --heads 2 --width 16 --context {CONTEXT} --batch 4 --steps 6 --eval-every 3 --sample 20"
        return main(["train", *shape.split(), "--data", str(story), "--out", str(folder), *options]), folder

    return run


def validation_loss(path: Path, data: Path) -> float:
    windows = read(data, CONTEXT).validation_windows(train.VALIDATION_WINDOWS, CONTEXT)
    with torch.no_grad():
        return checkpoint.load(path).loss(windows).item()


def assert_is_picture(path: Path) -> None:
    pixels = image.imread(path)
    assert pixels.shape[:2] == (750, 1200)
    assert len({tuple(pixel) for pixel in pixels[::5, ::5].reshape(-1, pixels.shape[2]).tolist()}) > 2


# What a training leaves behind


def test_training_leaves_a_model_a_curve_and_the_truth_about_them(train_on, story, capsys):
    code, folder = train_on()
    shown = capsys.readouterr().out
    assert code == 0
    assert_is_picture(folder / "loss.png")
    assert f"validation loss {validation_loss(folder / 'model.safetensors', story):.4f} nats a byte" in shown
    assert "loads back, same validation loss" in shown
    assert "attention pyattn: " in shown
    assert "losses agree to" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("step ")] == ["0", "3"]


def test_training_learns(train_on, story):
    _, folder = train_on("--steps", "200", "--lr", "1e-2")
    assert validation_loss(folder / "model.safetensors", story) < 0.5 * read(story, CONTEXT).unigram_loss()


def test_the_seed_decides_the_weights(train_on):
    first, again, other = (
        (train_on("--seed", seed, out=out)[1] / "model.safetensors").read_bytes()
        for seed, out in (("1", "first"), ("1", "again"), ("2", "other"))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("options", ["--attention sdpa", "--attention reference", "--dtype bfloat16", "--dropout 0.1"])
def test_training_takes_other_attentions_and_dtypes(train_on, options, capsys):
    assert train_on(*options.split())[0] == 0
    assert "loads back, same validation loss" in capsys.readouterr().out


def test_a_wrong_attention_is_found_out(train_on, monkeypatch, capsys):
    def looks_ahead(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setitem(ATTENTIONS, "sdpa", looks_ahead)
    assert train_on("--attention", "sdpa")[0] == 1
    assert "losses DIFFER by" in capsys.readouterr().out


def test_a_checkpoint_that_changes_is_found_out(train_on, monkeypatch, capsys):
    load = checkpoint.load

    def load_scaled(*args: object) -> GPT:
        model = load(*args)
        model.token.weight.data *= 1.01
        return model

    monkeypatch.setattr(checkpoint, "load", load_scaled)
    assert train_on()[0] == 1
    assert "loads back to ANOTHER validation loss" in capsys.readouterr().out


@pytest.mark.parametrize("steps_taken", [0, 2])
def test_ctrl_c_keeps_what_was_trained(train_on, story, monkeypatch, capsys, steps_taken):
    take_step, calls = torch.optim.AdamW.step, []

    def interrupted(self: torch.optim.AdamW, *args: object) -> object:
        if len(calls) == steps_taken:
            raise KeyboardInterrupt
        calls.append(args)
        return take_step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    code, folder = train_on()
    shown = capsys.readouterr().out
    assert code == 130
    assert f"after {steps_taken} of 6 steps" in shown
    assert f"validation loss {validation_loss(folder / 'model.safetensors', story):.4f} nats a byte" in shown
    assert "losses agree to" in shown
    assert_is_picture(folder / "loss.png")


# Bad input: exit code 2 and one sentence


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps -1", "--steps must be at least 1, got -1"),
        ("--eval-every 0", "--eval-every must be at least 1, got 0"),
        ("--threads 0", "--threads must be at least 1, got 0"),
        ("--seed -1", "--seed must lie in [0, 2^64), got -1"),
        ("--sample -1", "--sample must not be negative, got -1"),
        ("--lr nan", "--lr must be positive and finite, got nan"),
        ("--temperature 0", "--temperature must be positive and finite, got 0.0"),
        ("--layers 0", "layers must be at least 1, got 0"),
        ("--heads 3", "width must be a multiple of heads, got 16 and 3"),
        ("--dropout 1", "dropout must lie in [0, 1), got 1.0"),
        ("--context 5000", "must be longer than the context, got 809 of 8090 bytes and context 5000"),
        ("--data nowhere", "data must be an existing file or folder, got nowhere"),
        ("--out /dev/null/run", "--out must be a folder that can be written to, got /dev/null/run"),
    ],
)
def test_bad_values_are_one_sentence(train_on, capsys, options, message):
    assert train_on(*options.split())[0] == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("pyattn: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_unknown_options_and_commands_exit_with_2(capsys):
    for argv in (["train", "--steps", "many"], ["train", "--attention", "none"], ["sing"], []):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2
        assert "usage: pyattn" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (False, f"needs a GPU that this torch can use, got torch {torch.__version__} without one"),
        (True, "needs a build of pyattn with CUDA kernels (PYATTN_CUDA=ON), got a build without"),
    ],
)
def test_cuda_without_a_gpu_or_kernels_is_one_sentence(monkeypatch, capsys, command, gpu, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(_C, "cuda_archs", [])
    assert main([command, "--device", "cuda"]) == 2
    assert capsys.readouterr() == ("", f"pyattn: --device cuda {message}\n")


# Text


def test_a_folder_is_read_without_what_is_not_text(tmp_path):
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "deep" / "down" / "b.md").write_bytes("ü".encode() * 250)
    for name, content in {"x.bin": b"a\0b", "y.txt": b"\xff\xfe", "empty.txt": b"", ".hidden": b"h" * 900}.items():
        (tmp_path / name).write_bytes(content)
    text = read(tmp_path, CONTEXT)
    assert (len(text.train), len(text.validation)) == (900, 100)
    assert sorted(bytes(torch.cat([text.train, text.validation]).tolist())) == sorted(b"a" * 500 + "ü".encode() * 250)
    assert torch.equal(text.train, read(tmp_path, CONTEXT).train)


def test_a_folder_without_text_is_rejected(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0" * 900)
    with pytest.raises(InputError, match=r"data must hold text \(UTF-8\), got none in 1 files of"):
        read(tmp_path, CONTEXT)


def test_text_is_capped(tmp_path, monkeypatch):
    monkeypatch.setattr("pyattn.cli.text.MAX_BYTES", 1000)
    (tmp_path / "long.txt").write_bytes(b"x" + "ü".encode() * 5000)  # the cap falls inside a character
    text = read(tmp_path / "long.txt", CONTEXT)
    assert len(text.train) + len(text.validation) == 1000


def test_without_data_the_standard_library_is_read():
    text = read(None, 256)
    assert 2**20 < len(text.train) < MAX_BYTES
    assert b"import " in bytes(text.train.tolist())


def test_batches_are_windows_of_the_text(story):
    text = read(story, CONTEXT)
    content, held_out = bytes(text.train.tolist()), bytes(text.validation.tolist())
    windows = next(text.batches(4, CONTEXT, torch.Generator().manual_seed(0)))
    assert windows.shape == (4, CONTEXT + 1)
    assert all(bytes(window) in content for window in windows.tolist())
    spread = text.validation_windows(5, CONTEXT).tolist()
    assert bytes(spread[0]) == held_out[: CONTEXT + 1]
    assert bytes(spread[-1]) == held_out[-CONTEXT - 1 :]


# The model


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL).eval()


@pytest.fixture
def windows() -> Tensor:
    return torch.randint(256, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def test_parameters_are_counted_as_in_gpt2(model):
    layers, width, vocab = SMALL.layers, SMALL.width, SMALL.vocab
    block = 12 * width**2 + 13 * width  # qkv 3, project 1, up 4, down 4; biases 3 + 1 + 4 + 1, two norms of 2
    expected = (vocab + CONTEXT) * width + layers * block + 2 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert sum(p.numel() for p in GPT(Config(12, 12, 768, 1024, 50257)).parameters()) == 124_439_808


def test_input_and_output_share_their_weights(model):
    ids = torch.zeros(1, 4, dtype=torch.long)
    before = model(ids)
    model.token.weight.data[7] += 1.0
    changed = (model(ids) != before).nonzero()[:, -1].unique()
    assert changed.tolist() == [7]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_later_tokens_leave_earlier_logits_alone(model, windows, name):
    model.attend = ATTENTIONS[name]
    ids = windows[:, :-1]
    later = ids.clone()
    later[:, 9:] = 255 - later[:, 9:]
    before, after = model(ids), model(later)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_give_the_same_loss_and_gradients(model, windows, name):
    results = []
    for attend in (attend_reference, ATTENTIONS[name]):
        model.attend = attend
        loss = model.loss(windows)
        results.append((loss.item(), torch.autograd.grad(loss, model.blocks[0].qkv.weight)[0]))
    (expected, expected_grad), (loss, grad) = results
    assert abs(loss - expected) <= rounding_bound(model, torch.float32, expected)
    share = rounding_bound(model, torch.float32, 1.0)  # of the largest gradient, as of the loss
    assert (grad - expected_grad).abs().max() <= share * expected_grad.abs().max()


def test_dropout_is_drawn_anew_in_training_only(windows):
    model = GPT(Config(2, 2, 16, CONTEXT, dropout=0.5))
    assert model.loss(windows) != model.loss(windows)
    assert model.eval().loss(windows) == model.loss(windows)


def test_generation_repeats_and_outgrows_the_context(model, windows):
    def draw(top_k: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model.generate(windows[:, :3], 2 * CONTEXT, generator, temperature=1.0, top_k=top_k)

    assert draw(40, seed=1).shape == (3, 3 + 2 * CONTEXT)
    assert torch.equal(draw(40, seed=1), draw(40, seed=1))
    assert not torch.equal(draw(40, seed=1), draw(40, seed=2))
    assert torch.equal(draw(1, seed=1), draw(1, seed=2))


def test_longer_input_than_the_context_is_rejected(model):
    with pytest.raises(InputError, match="tokens must fit the context of 16, got 17"):
        model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


def test_the_learning_rate_rises_and_falls():
    recipe = Recipe(steps=100, batch=1, lr=1.0, eval_every=1, dtype=torch.float32)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert max(rates) == 1.0
    assert 0.0 < rates[-1] < 0.001


# What is there


def facts_of(shown: str) -> dict[str, str]:
    return dict(re.split("  +", line, maxsplit=1) for line in shown.splitlines())


def test_info_names_gpus_and_what_kernels_are_for(monkeypatch, capsys):
    monkeypatch.setattr(_C, "cuda_archs", ["80", "90"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["Small GPU", "Large GPU"].__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 6), (12, 0)].__getitem__)
    assert main(["info"]) == 0
    facts = facts_of(capsys.readouterr().out)
    assert facts["CUDA kernels"] == "sm_80 sm_90"
    assert facts["GPU"] == "Small GPU (sm_86), Large GPU (sm_120)"


def test_info_asks_the_device_for_its_dtypes(monkeypatch, capsys):
    def attention(q: Tensor, *_: Tensor) -> None:
        if (q.device.type, q.dtype) == ("meta", torch.float64):
            raise TypeError

    ones = torch.ones
    monkeypatch.setattr(
        torch, "ones", lambda *size, device, **options: ones(*size, device=STANDS_IN[device], **options)
    )
    monkeypatch.setattr(info, "attention", attention)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_C, "cuda_archs", ["90"])
    for device, dtypes in (("cuda", "float32 float16 bfloat16"), ("cpu", "float32 float64 float16 bfloat16")):
        assert main(["info", "--device", device]) == 0
        assert facts_of(capsys.readouterr().out)["dtypes"] == dtypes


# Processes of their own


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600)


def test_info_as_a_module():
    done = python("-m", "pyattn", "info")
    assert (done.returncode, done.stderr) == (0, "")
    facts = facts_of(done.stdout)
    assert facts["ISA active"] in facts["ISAs available"].split()
    assert set(facts["ISAs available"].split()) <= set(facts["ISAs compiled"].split())
    assert torch.__version__ in facts["torch"]
    assert "float32" in facts["dtypes"].split()


def test_a_missing_extra_names_the_command_that_mends_it():
    done = python("-c", "import sys; sys.modules['tqdm'] = None; import pyattn.cli as c; sys.exit(c.main(['train']))")
    assert done.returncode == 2
    assert "train needs tqdm, which is not installed: pip install 'pyattn[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_needs_no_extra():
    done = python("-c", "import sys, pyattn; print({'pyattn.cli', 'matplotlib', 'safetensors'} & set(sys.modules))")
    assert done.stdout == "set()\n"
