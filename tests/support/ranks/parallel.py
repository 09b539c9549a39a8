"""The code that ranks run for test_tensor_parallel.py: a module and its parallel twin, from the same seeds."""

import copy
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from support.modules import cache_for, class_of, set_dropout
from support.ranks import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from pyattn.distributed import TensorParallel, tensor_parallel, whole_state_dict

D_IN, LENGTH = 16, 9

CASES: dict[str, tuple[Any, ...]] = {
    "MultiHeadAttention": (D_IN, 16, LENGTH, 0.0, 8, True),
    "Attention": (D_IN, 8),
    "GroupedQueryAttention": (D_IN, 16, 0.0, 8, 4, None, True),
    "MultiHeadLatentAttention": (D_IN, 4, 5, 7, 6, 4, 3, 0.0, True),
    "MultiHeadLatentAttention, one query projection": (D_IN, 4, None, 7, 6, 4, 3),
    "MHAEinsum": (D_IN, 16, LENGTH, 0.0, 4, True),
    "MultiHeadAttentionCombinedQKV": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchScaledDotProduct": (D_IN, 16, 8, LENGTH),
    "MHAPyTorchSDPAWithoutFlash": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchFlexAttention": (D_IN, 16, 4, LENGTH, 0.0, True),
    "MHAPyTorchClass": (D_IN, D_IN, 4, LENGTH, 0.0, True),
    "MultiHeadAttentionWrapper": (D_IN, 3, LENGTH, 0.0, 4, True),
    "Ch03_MHA_Wrapper": (D_IN, 3, LENGTH, 0.0, 4, True),
    "book.MultiHeadLatentAttention": (D_IN, 16, 0.0, 4, True),
    "MultiHeadAttentionWithSWA": (D_IN, 16, 0.0, 4, True, 3),
    "GatedMultiHeadAttention": (D_IN, 16, LENGTH, 0.0, 4, True),
}


def made(name: str, dtype: torch.dtype, dropout: float, keywords: dict[str, Any]) -> nn.Module:
    """A module whose parameters are those of a seed."""
    torch.manual_seed(1)
    module: nn.Module = class_of(name.partition(",")[0])(*CASES[name], **keywords).to(dtype)
    if getattr(module, "sinks", None) is not None:
        nn.init.normal_(module.sinks)
    set_dropout(module, dropout)
    return module


def whole(tensor: Tensor) -> Tensor:
    """A parameter or its gradient as one process has it."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.flatten(0, 1) if full.shape[0] == 3 and full.dim() > 1 else full


def step(module: nn.Module, x: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """out, weights if requested, and the gradients of x and of every parameter, by name."""
    torch.manual_seed(7)
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    result = module(leaf, **arguments)
    out, *weights = result if isinstance(result, tuple) else (result,)
    factors = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    loss = (out * factors).sum() + sum((w.square().sum() for w in weights), torch.zeros(()))
    loss.backward()
    found = {"out": out.detach(), "dx": leaf.grad} | {f"weights{i}": w.detach() for i, w in enumerate(weights)}
    return found | {name: whole(p.grad) for name, p in module.named_parameters()}


def compare(
    group: dist.ProcessGroup,
    name: str,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    keywords: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> None:
    """The parallel module's results and gradients are those of one process."""
    keywords, arguments = keywords or {}, arguments or {}
    module = made(name, dtype, dropout, keywords)
    twin = tensor_parallel(copy.deepcopy(module), DeviceMesh.from_group(group, "cpu"))
    torch.manual_seed(2)
    x = torch.randn(2, 7, D_IN, dtype=dtype)
    expected, found = step(module, x, arguments), step(twin, x, arguments)
    shown = f"{name} {dropout} {keywords} {list(arguments)}"
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for key, value in found.items():
        torch.testing.assert_close(
            value, expected[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{shown} {k}: {m}"
        )
    missing = expected.keys() - found.keys()
    assert all(key.startswith("heads.") for key in missing), missing


def compare_all(group: dist.ProcessGroup, cases: list[tuple[Any, ...]]) -> None:
    """:func:`compare` of each case."""
    for case in cases:
        compare(group, *case)


@torch.inference_mode()
def decoding(group: dist.ProcessGroup, name: str, own_cache: bool) -> None:
    """A prompt and then token by token, over a cache of the rank's heads, as one process does."""
    module = made(name, torch.float64, 0.0, {}).eval()
    twin = tensor_parallel(copy.deepcopy(module), DeviceMesh.from_group(group, "cpu"))
    torch.manual_seed(2)
    x = torch.randn(2, LENGTH, D_IN, dtype=torch.float64)
    outs = []
    for each in (module, twin):
        cache = cache_for(each, seqlen=LENGTH)
        options: dict[str, Any] = {"use_cache": True} if own_cache else {"kv_cache": cache}
        parts = [x[:, :4], *x[:, 4:].split(1, 1)]
        outs.append(torch.cat([each(part, **options) for part in parts], 1))
        if own_cache:
            assert each._own_cache.cache.k.shape[1] == each.num_kv_groups
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)


class Block(nn.Module):
    """Attention and a residual path, as in a larger model."""

    def __init__(self, name: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_IN, dtype=torch.float64)
        self.att = made(name, torch.float64, dropout, {})
        self.back = nn.LazyLinear(D_IN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.att(self.norm(x)))


def model_of(name: str, dropout: float) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Block(name, dropout), Block(name, dropout))
    with torch.no_grad():
        model(torch.zeros(1, 2, D_IN, dtype=torch.float64))
    return model


def losses(model: nn.Module, x: Tensor, run: Any = None) -> Tensor:
    """The losses of each sequence in three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    found = []
    for number in range(3):
        torch.manual_seed(number)
        loss = (run or model)(x).square().mean((1, 2))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    """Each block's activations are computed again in backward."""
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def train(group: dist.ProcessGroup, name: str, how: str) -> None:
    """Three steps of a model on 4 x 2 ranks; with data parallelism, each row of ranks has one of four sequences."""
    mesh = ranks.mesh_of("mesh 4x2")
    own, dropout, run = slice(mesh.get_local_rank("far"), mesh.get_local_rank("far") + 1), 0.0, None
    torch.manual_seed(4)
    x = torch.randn(4, 7, D_IN, dtype=torch.float64)
    if how == "checkpoint":
        own, dropout = slice(None), 0.3
    alone = model_of(name, dropout)
    expected = losses(alone, x)
    model: nn.Module = model_of(name, dropout)
    parallelize_module(model, mesh["near"], {"*.att": TensorParallel()})
    if how == "fsdp":
        for block in model.children():
            fully_shard(block, mesh=mesh["far"])
        fully_shard(model, mesh=mesh["far"])
    elif how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["far"])
    else:
        run = functools.partial(checkpointed, model)
    found = losses(model, x[own], run)
    torch.testing.assert_close(found, expected[:, own], rtol=1e-11, atol=1e-11)
    state = {key.removeprefix("module."): value for key, value in whole_state_dict(model).items()}
    torch.testing.assert_close({key: state[key] for key, _ in alone.named_parameters()}, dict(alone.named_parameters()))


def states(group: dist.ProcessGroup, name: str) -> None:
    """A whole state loads into a parallel module, and the parallel module's whole state into one process's."""
    mesh = DeviceMesh.from_group(group, "cpu")
    module, other = (made(name, torch.float64, 0.0, {}) for _ in range(2))
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    twin = tensor_parallel(other, mesh)
    assert twin.load_state_dict(module.state_dict()) == twin.load_state_dict(twin.state_dict())
    found = whole_state_dict(nn.Sequential(twin))
    assert {key.removeprefix("0.") for key in found} == module.state_dict().keys()
    for key, value in module.state_dict().items():
        assert torch.equal(found[f"0.{key}"], value), key
    module.load_state_dict(whole_state_dict(twin))


def saved(group: dist.ProcessGroup, name: str, folder: str) -> None:
    """torch's distributed checkpoints save a parallel module and load it."""
    mesh = ranks.mesh_of("mesh 4x2")["near"]
    twin = tensor_parallel(made(name, torch.float64, 0.0, {}), mesh)
    expected = {key: value.clone() for key, value in twin.state_dict().items()}
    checkpoints.save(twin.state_dict(), checkpoint_id=folder)
    for parameter in twin.parameters():
        parameter.detach().zero_()
    state = twin.state_dict()
    checkpoints.load(state, checkpoint_id=folder)
    twin.load_state_dict(state)
    for key, value in twin.state_dict().items():
        assert torch.equal(whole(value), whole(expected[key])), key


def out_of_step(group: dist.ProcessGroup) -> None:
    """Ranks whose generators differ drop the weights that rank 0 would."""
    module = made("MultiHeadAttention", torch.float64, 0.5, {})
    twin = tensor_parallel(copy.deepcopy(module), DeviceMesh.from_group(group, "cpu"))
    x = torch.randn(2, 7, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(dist.get_rank(group))
    found = twin(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, module(x), rtol=1e-12, atol=1e-12)


def from_dtensor(group: dist.ProcessGroup) -> None:
    """x is a DTensor sharded over the sequence, as in a model of torch's sequence parallelism."""
    mesh = DeviceMesh.from_group(group, "cpu")
    module = made("MultiHeadAttention", torch.float64, 0.0, {})
    twin = parallelize_module(copy.deepcopy(module), mesh, TensorParallel())
    x = torch.randn(2, 8, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    outs = module(leaves[0]), twin(leaves[1])
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
    assert leaves[1].grad.placements == (Shard(1),)
    torch.testing.assert_close(leaves[1].grad.full_tensor(), leaves[0].grad, rtol=1e-12, atol=1e-12)


def refusal(group: dist.ProcessGroup, name: str, arguments: dict[int, tuple[Any, ...]], again: bool = False) -> str:
    """The error of dividing a module, whose arguments some ranks change."""
    module = class_of(name)(*arguments.get(dist.get_rank(group), arguments[0]))
    mesh = DeviceMesh.from_group(group, "cpu")
    try:
        tensor_parallel(module, mesh)
        if again:
            tensor_parallel(module, mesh)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differing_calls(group: dist.ProcessGroup, check: str) -> list[str]:
    """The errors of calls whose arguments differ between ranks: as a first call, and after one that is alike."""
    rank, found = dist.get_rank(group), []
    x, mask = torch.zeros(2, 7, D_IN, dtype=torch.float64), torch.ones(7, 7, dtype=torch.bool)
    some = {"x": x, "mask": mask} if rank else {"x": x}
    os.environ["PYATTN_CHECK"] = check
    for arguments in ({"x": x[:, rank:]}, {"mask": None} | some, some):
        for first in (True, False):
            module = made("MultiHeadAttention", torch.float64, 0.0, {})
            tensor_parallel(module, DeviceMesh.from_group(group, "cpu"))
            if not first:
                module(x)
            try:
                module(**(arguments if first or check == "1" else some))
                found.append("no error")
            except ValueError as error:
                found.append(str(error))
    del os.environ["PYATTN_CHECK"]
    return found


def refusals_of_a_call(group: dist.ProcessGroup) -> list[str]:
    """The errors of other places and of wrong masks."""
    mesh = ranks.mesh_of("mesh 4x2")
    twin = tensor_parallel(made("MultiHeadAttention", torch.float32, 0.0, {}), mesh["near"])
    x, found = torch.zeros(2, 7, D_IN), []
    calls = (
        lambda: tensor_parallel(made("Attention", torch.float32, 0.0, {}), mesh),
        lambda: tensor_parallel(made("Attention", torch.float32, 0.0, {}), group),
        lambda: twin(x, mask=torch.ones(2, 7, 7).bool()),
        lambda: twin(x[..., :5]),
        lambda: twin(x, is_causal=True),
        lambda: twin("x"),
    )
    for call in calls:
        try:
            call()
            found.append("no error")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
