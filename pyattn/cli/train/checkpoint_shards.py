"""Weights and moments in a folder, written by all ranks together, by torch.distributed.checkpoint.

Each rank writes a safetensors file with a part of the tensors, so nothing is unpickled when they are read.
"""

import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from pyattn.cli import InputError
from pyattn.cli.output import SHARDS
from pyattn.cli.train import tensor_parallel
from pyattn.cli.train.one_process import Alone


def save(run: Path, steps: int, pieces: dict[str, Any], ranks: Alone) -> str:
    """Write what :func:`pyattn.cli.train.tensor_parallel.placed` gives for each tensor to a new folder in ``run``.

    Returns:
        The folder's name, once all ranks have written and synced their files.

    Raises:
        InputError, on every rank: one of them could not write; the folder is removed.
    """
    name: str = ranks.same(f"shards-{steps}-{secrets.token_hex(4)}")
    folder = run / name
    try:
        write(pieces, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)
        rank, (fault, _) = min(error.failures.items())
        reason = getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
        got = f"{folder} (rank {rank}: {reason}; the earlier checkpoint is kept)"
        raise InputError("a checkpoint must fit its disk whole", got) from error
    return name


def load(run: Path, name: str) -> dict[str, Tensor]:
    """The whole tensors that ranks, however many, wrote to the folder ``name``.

    Raises:
        ValueError, OSError, SafetensorError: no such folder, or not as :func:`save` wrote it.
    """
    if not SHARDS.fullmatch(name):
        raise ValueError(f"shards must be the name of a folder that pyattn train wrote, got {name!r}")
    folder = run / name
    reader = HuggingFaceStorageReader(str(folder))
    facts = reader.read_metadata().state_dict_metadata
    sizes = {key: fact.size for key, fact in facts.items() if isinstance(fact, TensorStorageMetadata)}
    there = sum(path.stat().st_size for path in folder.iterdir())
    claimed = sum(size.numel() * torch.float32.itemsize for size in sizes.values())
    if claimed > there:
        raise ValueError(f"{name} must hold the {claimed} bytes that its files claim, got {there}")
    whole = {key: torch.empty(size) for key, size in sizes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that no_dist is in use
        read(whole, storage_reader=reader, no_dist=True)
    return {key: tensor_parallel.stacked(key, tensor) for key, tensor in whole.items()}
