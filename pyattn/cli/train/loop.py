"""The training loop, the losses it records, and its progress: a bar on a terminal, and a line per validation."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.contention import SpinNotice
from pyattn.cli.gpt import GPT
from pyattn.cli.text import Text
from pyattn.cli.train.one_process import Alone

TIMES = (1, 2, 4, 8, 16)
"""Lengths of the texts that a model without learned positions reads, in multiples of its training length."""

TEXTS = 32
"""Texts to read: the mean of 32 x 128 losses, each with a deviation near 2 nats, has a deviation near 0.03."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: optimiser steps.
        batch: windows per step.
        lr: highest learning rate, reached when warm-up ends.
        eval_every: steps from one validation to the next.
        dtype: float32, or bfloat16 for autocast.
    """

    steps: int
    batch: int
    lr: float
    eval_every: int
    dtype: torch.dtype

    def rate(self, step: int) -> float:
        """The learning rate of ``step``: linear warm-up over the first twentieth, then cosine decay to nearly 0."""
        warm_up = max(self.steps // 20, 1)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up)))


@dataclass
class Losses:
    """The losses so far, in nats per byte, by the number of completed steps."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """A training in progress: the state that changes, and the settings that don't.

    Attributes:
        generator: source of the batches; torch's own generator, which dropout uses, is part of the state too.
        validation: windows (windows, context + 1).
        ranks: the processes that share the work; each draws the same batches and takes its part.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    recipe: Recipe
    validation: Tensor
    losses: Losses = field(default_factory=Losses)
    ranks: Alone = field(default_factory=Alone)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """All generators in use; on a GPU, dropout draws from the GPU's own."""
        on_gpu = self.model.device.type == "cuda"
        others = {"cuda": torch.cuda.default_generators[torch.cuda.current_device()]} if on_gpu else {}
        return {"batches": self.generator, "torch": torch.default_generator, **others}


class DivergenceError(ArithmeticError):
    """A training or validation loss is infinite or NaN."""

    def __init__(self, kind: str, step: int, loss: float) -> None:
        super().__init__(f"the {kind} loss at step {step} is {loss}")


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Autocast of matrix products to ``dtype``; float32 disables it."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def loss_of(model: GPT, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """The model's loss on ``windows`` (B, S + 1), with matrix products in ``dtype``."""
    device = model.device
    with autocast(device, dtype):
        return model.loss(windows.to(device))


@torch.no_grad()
def validate(model: GPT, windows: Tensor, recipe: Recipe, ranks: Alone) -> float:
    """The mean loss over ``windows``, one batch at a time, without dropout; the model stays in eval mode."""
    model.eval()
    sums = [loss_of(model, part, recipe.dtype).double() * len(part) for part in torch.split(windows, recipe.batch)]
    return ranks.total(torch.stack(sums).sum()).item() / len(windows)


def make_optimizer(model: GPT) -> torch.optim.AdamW:
    """AdamW as in GPT-3 (Brown et al. 2020, appendix B): weight decay for matrices, none for vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def evaluate(training: Training, step: int) -> float:
    """Record the validation loss after ``step`` steps and return it.

    Raises:
        DivergenceError: the loss is not finite.
    """
    loss = validate(training.model, training.validation, training.recipe, training.ranks)
    if not math.isfinite(loss):
        raise DivergenceError("validation", step, loss)
    training.losses.validation[step] = loss
    return loss


class Progress:
    """Shows ``steps`` steps of ``tokens`` tokens each, by ``threads`` CPU threads (0 on a GPU), from step ``done`` on.

    The bar shows the speed. A log has no bar, so each line shows it: tokens per second since the last line, not
    counting validation itself.
    """

    tokens: int
    notice: SpinNotice
    lines_show_speed: bool
    steps: int
    seconds: float
    resumed: float

    def __init__(self, steps: int, tokens: int, threads: int, done: int = 0) -> None:
        self.tokens, self.notice = tokens, SpinNotice(threads)
        self.bar: tqdm[NoReturn] = tqdm(
            total=steps * tokens, initial=done * tokens, unit="tokens", unit_scale=True, disable=None
        )
        self.lines_show_speed = self.bar.disable or not sys.stdout.isatty()
        self.steps, self.seconds = 0, 0.0
        self.resumed = time.perf_counter()

    def close(self) -> None:
        """Release the terminal."""
        self.bar.close()

    def validated(self, step: int, loss: float) -> None:
        """Show the validation loss after ``step`` steps."""
        speed = f"  {self.steps * self.tokens / self.seconds:,.0f} tokens/s" if self.steps else ""
        self.bar.write(f"step {step:5}  validation loss {loss:.4f}{speed if self.lines_show_speed else ''}")
        self.steps, self.seconds = 0, 0.0
        self.resumed = time.perf_counter()

    def stepped(self, loss: float) -> None:
        """Count one step with training loss ``loss``."""
        now = time.perf_counter()
        self.steps, self.seconds, self.resumed = self.steps + 1, self.seconds + now - self.resumed, now
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update(self.tokens)
        if sentence := self.notice.look():
            self.bar.write(sentence)


def fit(training: Training, batches: Iterator[Tensor], keep: Callable[[], None]) -> None:
    """Continue ``training`` on ``batches``, each (batch, context + 1); its losses say which steps are done.

    ``keep`` is called after each validation. When Ctrl-C raises KeyboardInterrupt here, the model and losses are those
    of the completed steps.

    Raises:
        DivergenceError: a loss is not finite.
    """
    model, optimizer, recipe, losses = training.model, training.optimizer, training.recipe, training.losses
    ranks = training.ranks
    done = len(losses.train)
    threads = torch.get_num_threads() if model.device.type == "cpu" else 0
    with closing(Progress(recipe.steps, recipe.batch * model.config.context, threads, done)) as progress:
        for step in range(done, recipe.steps):
            if step % recipe.eval_every == 0:
                progress.validated(step, evaluate(training, step))
                keep()
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            loss = loss_of(model, next(batches), recipe.dtype)
            torch.autograd.backward(loss)
            loss = ranks.sum_gradients(model, loss)
            ranks.clip(model)
            optimizer.step()
            value = loss.item()
            if not math.isfinite(value):
                raise DivergenceError("training", step + 1, value)
            losses.train[step + 1] = value
            progress.stepped(value)


@torch.no_grad()
def losses_past(model: GPT, text: Text, dtype: torch.dtype) -> dict[int, float]:
    """The mean loss of the same validation bytes, by the length of the text they end, for the lengths the text allows.

    The bytes are the last half training length of each text, so the shortest text also has as many bytes before them.
    """
    context, device = model.config.context, model.device
    lengths = [context * times for times in TIMES if context * times < len(text.validation)]
    if not lengths:
        return {}
    model.eval()
    texts = text.validation_windows(TEXTS, lengths[-1]).to(device)
    judged, losses = -(-context // 2), dict.fromkeys(lengths, 0.0)
    for length in lengths:
        for ids in texts[:, -length - 1 :]:
            with autocast(device, dtype):
                logits = model(ids[None, :-1])[0, -judged:]
            losses[length] += nn.functional.cross_entropy(logits.float(), ids[-judged:]).item() / TEXTS
    return losses


def show_losses_past(model: GPT, text: Text, dtype: torch.dtype) -> None:
    """Print :func:`losses_past`, for a model without learned positions, which reads past its training length."""
    if model.position is None:
        found = ", ".join(f"{length:,}: {loss:.4f}" for length, loss in losses_past(model, text, dtype).items())
        print(f"past the training length, validation loss of the same bytes at the end of {found}")
