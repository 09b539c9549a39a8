"""Dropout of weights, recorded as a product with factors that native code draws, too."""

from typing import Any

import torch

from pyattn.adapters.scratch.recording.deferred import Cell
from pyattn.adapters.scratch.recording.expressions import Noise
from pyattn.adapters.scratch.recording.operators import Scores

DROPOUTS: set[Any] = {torch.nn.functional.dropout, torch.dropout, torch.dropout_}


def as_product(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Dropout of weights as their product with deferred factors."""
    names = ("input", "p", "training" if func is torch.nn.functional.dropout else "train", "inplace")
    given: dict[str, Any] = {"p": 0.5, "training": True, "train": True, "inplace": func is torch.dropout_}
    given |= dict(zip(names, args, strict=False)) | kwargs
    weights, p = given["input"], given["p"]
    on = given["training"] and given["train"]
    chain = weights.cell.meaning
    if not on or chain is None or not chain.weights or not isinstance(p, float) or not 0 < p < 1:
        return func, args, kwargs
    seed = torch.empty((), dtype=torch.int64, device=weights.device).random_()
    size = (*chain.leads[-1], *chain.sizes)
    noise = chain.product.defer(Noise(seed, float(p), size, weights.dtype, chain.order))
    factors = Scores(Cell(noise, None), weights.shape, None, weights)
    return (torch.Tensor.mul_ if given["inplace"] else torch.mul), (weights, factors), {}
