"""``pyattn train``: train a small GPT on text, save it, and compare its attention with a pure-Python one.

Writes the model (model.safetensors, at each validation and at the end), what --resume needs (training.safetensors, at
each validation) and the loss curve (loss.png) to --out. Ctrl-C ends training early and finishes the run as usual;
--resume goes on from the last validation, to the bit. A loss that is infinite or NaN ends the run; the model of the
last validation is kept.
"""

import argparse
import datetime
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pyattn import _C
from pyattn.cli import InputError, chart, checkpoint, generation, lengths, state
from pyattn.cli.checkpoint import MODEL
from pyattn.cli.compare import ATTENTIONS, compare
from pyattn.cli.device import DEVICES, check_device
from pyattn.cli.fit import DivergenceError, Losses, Recipe, evaluate, fit, make_optimizer, validate
from pyattn.cli.gpt import GPT, Config
from pyattn.cli.output import make_folder
from pyattn.cli.text import Text, read

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BFLOAT16_PRODUCTS = ("avx512_bf16",)
"""Instruction sets that multiply bfloat16; on others it is converted to float32 first, in torch's linears too."""

CURVE = "loss.png"

VALIDATION_WINDOWS = 64
"""A byte's loss has a standard deviation near 2 nats: the mean of 64 windows of 256 has one near 2 / 128 = 0.016."""

PROMPT = 64
"""Bytes of validation text that the sample continues, a quarter of the context at most: a line or two, enough to see
its kind."""

COMPARED_BATCHES = 8
"""Few enough to take seconds, enough that one disturbed batch does not move the median."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; :func:`check` judges their values.

    The defaults reached the lowest loss of what was tried at equal cost (two minutes on two Zen 4 cores): 1.8 nats a
    byte with 2 layers; 4 layers stayed at 2.3, with 1100 steps of 4 windows and with 550 of 8.
    """
    parser = argparse.ArgumentParser(
        prog="pyattn train", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=Config.layers, help="number of blocks")
    model.add_argument("--heads", type=int, default=Config.heads, help="attention heads in each block")
    model.add_argument("--width", type=int, default=Config.width, help="features of a token, a multiple of heads")
    model.add_argument("--context", type=int, default=Config.context, help="bytes the model can look back on")
    model.add_argument(
        "--dropout", type=float, default=Config.dropout, help="probability of dropping a weight or an output"
    )
    model.add_argument(
        "--window", type=int, default=Config.window, help="bytes that a byte sees, itself counted; 0: all"
    )
    model.add_argument("--sinks", action="store_true", help="give each head's softmax a learned sink")
    model.add_argument(
        "--alibi", action="store_true", help="ALiBi in place of learned positions, which end at the context"
    )
    model.add_argument("--attention", choices=ATTENTIONS, default="pyattn", help="whose attention to use")

    training = parser.add_argument_group("training")
    training.add_argument("--data", type=Path, help="text file or folder; None: Python's standard library")
    training.add_argument("--steps", type=int, default=2400, help="optimiser steps")
    training.add_argument("--batch", type=int, default=4, help="windows in a step")
    training.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    training.add_argument("--eval-every", type=int, default=200, help="steps from one validation to the next")
    training.add_argument("--seed", type=int, default=0, help="random seed of weights, batches, dropout and sample")
    training.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    training.add_argument("--device", choices=DEVICES, default="cpu", help="where to train")
    training.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of matrix products (bfloat16: autocast)"
    )

    training.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with the run in this folder, by its own options alone"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, help="folder to write; None: runs/ and the time")
    output.add_argument("--overwrite", action="store_true", help="replace an earlier run's files in --out")
    output.add_argument("--sample", type=int, default=400, help="bytes to generate at the end")
    output.add_argument(
        "--temperature", type=float, default=0.8, help="divides the sample's logits; lower is less random"
    )
    output.add_argument("--top-k", type=int, default=40, help="draw each byte of the sample from the likeliest K")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Raise InputError for the first invalid value; :class:`Config` checks the model's."""
    for name in ("steps", "batch", "eval_every", "threads", "top_k"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1", getattr(options, name))
    for name in ("lr", "temperature"):
        if not 0.0 < getattr(options, name) < math.inf:
            raise InputError(f"--{name} must be positive and finite", getattr(options, name))
    if options.attention == "sdpa" and (options.window or options.sinks or options.alibi):
        raise InputError("--window, --sinks and --alibi need another --attention", options.attention)
    if options.sample < 0:
        raise InputError("--sample must not be negative", options.sample)
    if not 0 <= options.seed < 2**64:  # what torch.Generator takes
        raise InputError("--seed must lie in [0, 2^64)", options.seed)
    check_device(options.device)


def introduce(options: argparse.Namespace, text: Text, model: GPT) -> None:
    """Print what is trained, on what text, and how."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = (len(text.train) + len(text.validation)) / 1e6
    print(f"text       {text.source}: {size:.2f} MB, the last tenth to validate on")
    print(
        f"model      {options.layers} layers, {options.heads} heads, width {options.width}, context {options.context}: "
        f"{parameters / 1e6:.2f} M parameters"
    )
    print(
        f"training   {options.steps} steps of {options.batch} x {options.context} bytes, "
        f"attention {options.attention}, "
        f"{options.dtype} on {options.device}, {options.threads} threads, seed {options.seed}"
    )
    if options.dtype == "bfloat16" and options.device == "cpu" and _C.active_isa() not in BFLOAT16_PRODUCTS:
        print(
            f"slow       {_C.active_isa()} does not multiply bfloat16: float32 is several times faster", file=sys.stderr
        )


def show_sample(model: GPT, text: Text, options: argparse.Namespace) -> None:
    """Print the beginning of the validation text and what the model adds to it."""
    prompt = text.validation[None, : max(1, min(PROMPT, options.context // 4))].long().to(options.device)
    size = prompt.shape[1]
    count = generation.room(model, size, options.sample)
    generator = torch.Generator().manual_seed(options.seed)
    read = generation.with_cache(model, 1, size + count)
    draw = {"temperature": options.temperature, "top_k": options.top_k}
    added = list(generation.continuation(read, prompt, count, generator, **draw))
    where = "" if count == options.sample else f", up to the context of {options.context} bytes"
    print(f"sample{where}\n{bytes(torch.cat([prompt, *added], 1)[0].tolist()).decode(errors='replace')}\n")


def compare_attention(model: GPT, text: Text, options: argparse.Namespace) -> bool:
    """Print the speed-up over the pure-Python attention. Returns whether their losses agree."""
    generator = torch.Generator().manual_seed(options.seed)
    batches = text.batches(options.batch, options.context, generator)
    warm_up_too = [next(batches) for _ in range(1 + COMPARED_BATCHES)]
    result = compare(model, warm_up_too, DTYPES[options.dtype])
    agree = result.difference <= result.bound
    print(
        f"attention {options.attention}: {result.attention_speedup:.1f}x the pure-Python attention "
        f"(whole step {result.step_speedup:.1f}x) on {COMPARED_BATCHES} batches of {options.batch} x {options.context} "
        f"tokens; losses {'agree to' if agree else 'DIFFER by'} {result.difference:.1g} "
        f"(rounding explains up to {result.bound:.1g})"
    )
    return agree


def give_up(reason: DivergenceError, losses: Losses, lr: float, folder: Path) -> None:
    """Print where training diverged, which weights are kept, and what to change."""
    kept = max(losses.validation, default=None)
    left = "" if kept is None else f"; {folder / MODEL} has the weights of step {kept}"
    print(f"pyattn: training diverged, {reason}{left}: lower --lr, got {lr:g}", file=sys.stderr)


def resumed(run: Path, argv: Sequence[str]) -> tuple[state.State, argparse.Namespace]:
    """The state that ``run`` was left in, and its options."""
    others = [word for word in argv if word.startswith("-") and word.partition("=")[0] != "--resume"]
    if others:
        raise InputError("--resume goes on by the options of its run, leave others out", " ".join(others))
    before = state.load(run)
    return before, argparse.Namespace(**vars(parse([])) | vars(before.options) | {"resume": run})


def run(argv: Sequence[str]) -> int:
    """Train, save, show a sample and the comparison. Returns the exit code."""
    options, before = parse(argv), None
    if options.resume is not None:
        before, options = resumed(options.resume, argv)
    check(options)
    model_options = {name: getattr(options, name) for name in ("dropout", "window", "sinks", "alibi")}
    config = Config(options.layers, options.heads, options.width, options.context, **model_options)
    recipe = Recipe(options.steps, options.batch, options.lr, options.eval_every, DTYPES[options.dtype])
    text = read(options.data, options.context)
    if before is None:
        named_by_time = Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        files = MODEL, state.STATE, CURVE
        folder = make_folder(options.out or named_by_time, files, options.overwrite)
    else:
        folder = options.resume
        if before.text != state.digest(text):
            raise InputError("--resume needs the text that its run began with", f"another one in {text.source}")

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    attend = ATTENTIONS[options.attention]
    model = GPT(config, attend).to(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    training = state.Training(model, make_optimizer(model), Losses(), generator)
    losses = training.losses
    introduce(options, text, model)
    if before is not None:
        before.restore(training)
        print(f"resumed    after {len(losses.train)} of {options.steps} steps")

    def keep() -> None:
        checkpoint.save(model, path)
        state.save(folder / state.STATE, training, options, text)

    batches = text.batches(options.batch, options.context, generator)
    validation = text.validation_windows(VALIDATION_WINDOWS, options.context)
    unigram = text.unigram_loss()
    title = f"GPT of {config.layers} layers, attention {options.attention}"
    path = folder / MODEL
    interrupted = False
    try:
        try:
            fit(model, training.optimizer, batches, validation, recipe, losses, keep)
        except KeyboardInterrupt:
            interrupted = True
            print(f"stopped    by Ctrl-C after {len(losses.train)} of {options.steps} steps; --resume {folder} goes on")
        final = evaluate(model, validation, recipe, losses, len(losses.train))
    except DivergenceError as reason:
        chart.draw(losses, unigram, title, folder / CURVE)
        give_up(reason, losses, options.lr, folder)
        return 1

    checkpoint.save(model, path)
    kept = validate(checkpoint.load(path, attend).to(options.device), validation, recipe) == final
    chart.draw(losses, unigram, title, folder / CURVE)

    show_sample(model, text, options)
    print(f"validation loss {final:.4f} nats a byte; byte frequencies alone {unigram:.4f}")
    lengths.show(model, text, DTYPES[options.dtype])
    print(f"checkpoint {path}: {'loads back, same' if kept else 'loads back to ANOTHER'} validation loss")
    print(f"curve      {folder / CURVE}")
    agree = compare_attention(model, text, options)
    if interrupted:
        return 130
    return 0 if kept and agree else 1
