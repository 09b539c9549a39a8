"""``pyattn train``: train a small GPT on text, save it, and compare its attention with a pure-Python one.

Writes the model (model.safetensors) and the state that --resume needs (training.safetensors) to --out, at each
validation and at the end, and the loss curve (loss.png). Ctrl-C ends training early and finishes the run as usual;
--resume continues from the last validation, to the bit. --resume with --steps extends a run. A loss that is infinite or
NaN ends the run; the model of the last validation is kept.

Under torchrun, --data-parallel, --context-parallel and --tensor-parallel share the work among its processes, with the
losses of one process to rounding, dropout included; the first process prints, and Ctrl-C ends all without a last
checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pyattn import isa
from pyattn.cli import InputError, chart, checkpoint, output
from pyattn.cli.checkpoint import MODEL
from pyattn.cli.generate import sampling
from pyattn.cli.gpt import ATTENTIONS, GPT
from pyattn.cli.options import DTYPES
from pyattn.cli.text import Text, read
from pyattn.cli.train import launch
from pyattn.cli.train import resume as state
from pyattn.cli.train.compare import compare
from pyattn.cli.train.loop import (
    DivergenceError,
    Losses,
    Recipe,
    Training,
    evaluate,
    fit,
    make_optimizer,
    show_losses_past,
    validate,
)
from pyattn.cli.train.one_process import OPTIONS as OF_RANKS
from pyattn.cli.train.one_process import Alone
from pyattn.cli.train.options import check, config_of, given, parser, prompt_size, sizes
from pyattn.instruction_sets import BFLOAT16_PRODUCTS, isas

CURVE = "loss.png"
FILES = MODEL, state.STATE, CURVE

VALIDATION_WINDOWS = 64
"""A byte's loss has a standard deviation near 2 nats: the mean of 64 windows of 256 has one near 2 / 128 = 0.016."""

COMPARED_BATCHES = 8
"""Few enough to take seconds; enough that one disturbed batch does not move the median."""


def introduce(options: argparse.Namespace, text: Text, model: GPT) -> None:
    """Print the model, its text, and the settings."""
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
    if options.dtype == "bfloat16" and options.device == "cpu" and not {*BFLOAT16_PRODUCTS} & {*isas()}:
        print(f"slow       {isa()} does not multiply bfloat16: float32 is several times faster", file=sys.stderr)


def show_sample(model: GPT, text: Text, options: argparse.Namespace) -> None:
    """Print the beginning of the validation text and the model's continuation."""
    prompt = text.validation[None, : prompt_size(options)].long().to(options.device)
    count = sampling.room(model.config, prompt.shape[1], options.sample)
    added = sampling.sampled(model, prompt, count, options)
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
    """Print where training diverged, which weights are kept, and which option to change."""
    kept = max(losses.validation, default=None)
    left = "" if kept is None else f"; {folder / MODEL} has the weights of step {kept}"
    print(f"pyattn: training diverged, {reason}{left}: lower --lr, got {lr:g}", file=sys.stderr)


def train(options: argparse.Namespace, text: Text, folder: Path, before: state.State | None, ranks: Alone) -> int:
    """Train from the beginning, or from the state ``before``; save, show a sample and the comparison."""
    config, path = config_of(options), folder / MODEL
    recipe = Recipe(options.steps, options.batch, options.lr, options.eval_every, DTYPES[options.dtype])
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    attend = ATTENTIONS[options.attention]
    model = ranks.part(GPT(config, attend).to(options.device))
    generator = torch.Generator().manual_seed(options.seed)
    validation = text.validation_windows(VALIDATION_WINDOWS, options.context)
    training = Training(model, make_optimizer(model), generator, recipe, validation, ranks=ranks)
    losses = training.losses
    if before is not None:
        before.restore(training)
    introduce(options, text, model)
    if before is not None:
        print(f"resumed    after {len(losses.train)} of {options.steps} steps")

    def keep() -> None:
        checkpoint.save(model, path, ranks)
        state.save(folder / state.STATE, training, options, text)

    batches = text.batches(options.batch, options.context, generator)
    unigram = text.unigram_loss()
    title = f"GPT of {config.layers} layers, attention {options.attention}"
    interrupted = False
    try:
        try:
            fit(training, batches, keep)
        except KeyboardInterrupt:
            if ranks.many:  # each rank may have stopped in another step
                print(f"stopped    by Ctrl-C; --resume {folder} continues from the last validation")
                return 130
            interrupted = True
            print(
                f"stopped    by Ctrl-C after {len(losses.train)} of {options.steps} steps; --resume {folder} continues"
            )
        final = evaluate(training, len(losses.train))
    except DivergenceError as reason:
        give_up(reason, losses, options.lr, folder)
        if ranks.first:
            chart.draw(losses, unigram, title, folder / CURVE)
        return 1

    if interrupted:
        checkpoint.save(model, path)  # no state: Ctrl-C in a step leaves random numbers drawn
    else:
        keep()
    loaded = ranks.part(checkpoint.load(path, attend).to(options.device))
    kept = validate(loaded, validation, recipe, ranks) == final
    if not ranks.first:
        return 0
    model = checkpoint.load(path, attend).to(options.device)  # whole, where a rank has a part
    chart.draw(losses, unigram, title, folder / CURVE)

    show_sample(model, text, options)
    print(f"validation loss {final:.4f} nats a byte; byte frequencies alone {unigram:.4f}")
    show_losses_past(model, text, DTYPES[options.dtype])
    print(f"checkpoint {path}: {'loads back, same' if kept else 'loads back to ANOTHER'} validation loss")
    print(f"curve      {folder / CURVE}")
    agree = compare_attention(model, text, options)
    if interrupted:
        return 130
    return 0 if kept and agree else 1


def resumed(folder: Path, options: argparse.Namespace, here: set[str]) -> tuple[argparse.Namespace, state.State]:
    """The options by which the run in ``folder`` continues, a few of them from ``here``, and its state."""
    before = state.load(folder)
    own = {name: getattr(options, name) for name in ("resume", *OF_RANKS)}
    options = argparse.Namespace(**vars(before.options) | own | ({"steps": options.steps} if "steps" in here else {}))
    if options.steps < before.steps:
        raise InputError(f"--steps must be at least the {before.steps} steps that are done", options.steps)
    check(options)
    return options, before


def resume(options: argparse.Namespace, here: set[str], ranks: Alone) -> int:
    """Continue the run in ``--resume`` to ``--steps`` in all, or without it to as many as the run planned."""
    folder, facts = options.resume, dict[str, Any]()
    with ExitStack() as stack:
        with ranks.agreement(facts):
            if not folder.is_dir():
                raise InputError(state.RULE, folder / state.STATE)
            if ranks.first:
                stack.enter_context(output.held("--resume", folder, FILES, overwrite=True))
            options, before = resumed(folder, options, here)
            text = read(options.data, options.context)
            if before.text != state.digest(text):
                raise InputError("--resume needs the text that its run began with", f"another one in {text.source}")
            facts |= common(options, text) | {"the steps done": before.steps}
        return train(options, text, folder, before, ranks)


def common(options: argparse.Namespace, text: Text) -> dict[str, Any]:
    """Options and text, which all ranks must have in common."""
    return {name: x for name, x in state.described(options).items() if name != "threads"} | {"text": state.digest(text)}


def begin(options: argparse.Namespace, ranks: Alone) -> int:
    """Train a new model; in processes that torchrun started again, continue from the last checkpoint."""
    facts = dict[str, Any]()
    with ExitStack() as stack:
        with ranks.agreement(facts):
            if options.out is None and launch.may_restart():
                raise InputError("--out must be given under --max-restarts, which continues there", "none")
            text = read(options.data, options.context)
            facts |= common(options, text)
        with ranks.agreement({}):
            folder = options.out
            if ranks.first:
                folder = options.out or output.new_folder(Path("runs"))
                overwrite = options.overwrite or launch.RESTARTS > 0
                stack.enter_context(output.held("--out", folder, FILES, overwrite, made=options.out is None))
        folder, before, found = ranks.same(folder), None, dict[str, Any]()
        with ranks.agreement(found):
            if not folder.is_dir():
                raise InputError("--out must be a folder that all ranks share", f"{folder}, which this one can't see")
            if launch.RESTARTS and (folder / state.STATE).exists():
                there = state.load(folder)
                # Another state is that of the run which --overwrite replaces.
                before = there if common(there.options, text) | {"text": there.text} == facts else None
                found["the steps done"] = before and before.steps
        return train(options, text, folder, before, ranks)


def ranks_of(options: argparse.Namespace) -> Alone:
    """The ranks of this training; in a process that nobody launched, one."""
    if not launch.launched():
        return Alone()
    from pyattn.cli.train.mesh import Mesh  # needs torch.distributed, which one process does not

    return Mesh(tuple(sizes(options)), options.device)


def run(argv: Sequence[str]) -> int:
    """Train a new model, or continue one. Returns the exit code."""

    def work() -> int:
        options = parser(__doc__).parse_args(argv)
        here = given(argv)
        if options.resume is not None and (others := sorted(here - {"resume", "steps", *OF_RANKS})):
            got = " ".join(f"--{name.replace('_', '-')}" for name in others)
            raise InputError("--resume continues by the options of its run but --steps, leave others out", got)
        if options.resume is None:
            check(options)
        with launch.group(sizes(options), options.device):
            ranks = ranks_of(options)
            return begin(options, ranks) if options.resume is None else resume(options, here, ranks)

    return launch.rank0_prints(work)
