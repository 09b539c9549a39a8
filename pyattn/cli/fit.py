"""The training loop, and the losses it leaves behind."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.gpt import GPT


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: optimiser steps.
        batch: windows in a step.
        lr: highest learning rate, in the step after warm-up.
        eval_every: steps from one validation to the next.
        dtype: float32, or bfloat16 for autocast.
    """

    steps: int
    batch: int
    lr: float
    eval_every: int
    dtype: torch.dtype

    def rate(self, step: int) -> float:
        """Learning rate of ``step``: up in a line over the first twentieth, then down a half cosine to nearly 0."""
        warm_up = max(self.steps // 20, 1)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up)))


@dataclass
class Losses:
    """What was measured so far: the loss in nats a byte by the number of steps taken."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Matrix products in ``dtype``; float32 leaves everything as it is."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def loss_of(model: GPT, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """The model's loss on ``windows`` (B, S + 1), its matrix products in ``dtype``."""
    device = model.token.weight.device
    with autocast(device, dtype):
        return model.loss(windows.to(device))


@torch.no_grad()
def validate(model: GPT, windows: Tensor, recipe: Recipe) -> float:
    """Mean loss over ``windows``, a batch at a time, without dropout; the model stays in eval mode."""
    model.eval()
    sums = [loss_of(model, part, recipe.dtype).double() * len(part) for part in torch.split(windows, recipe.batch)]
    return torch.stack(sums).sum().item() / len(windows)


def make_optimizer(model: GPT) -> torch.optim.AdamW:
    """AdamW as GPT-3 was trained (Brown et al. 2020, appendix B): matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def fit(model: GPT, batches: Iterator[Tensor], validation: Tensor, recipe: Recipe, losses: Losses) -> None:
    """Train ``model`` on ``batches``, each (batch, context + 1), and note in ``losses`` what comes of it.

    ``losses`` and the model are as good as the steps taken when Ctrl-C raises KeyboardInterrupt here.
    """
    optimizer = make_optimizer(model)
    tokens = recipe.batch * model.config.context
    with tqdm(total=recipe.steps * tokens, unit="tokens", unit_scale=True, disable=None) as bar:
        for step in range(recipe.steps):
            if step % recipe.eval_every == 0:
                losses.validation[step] = validate(model, validation, recipe)
                bar.write(f"step {step:5}  validation loss {losses.validation[step]:.4f}")
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            optimizer.zero_grad()
            loss = loss_of(model, next(batches), recipe.dtype)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # GPT-3's bound, same appendix
            optimizer.step()
            losses.train[step + 1] = loss.item()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update(tokens)
