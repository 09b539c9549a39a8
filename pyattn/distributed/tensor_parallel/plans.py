"""Plans: which part of each parameter a rank has of a multi-head module, so that it has some of the heads."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.nn import Module

from pyattn import nn
from pyattn.nn import book
from pyattn.nn.heads import Heads

COLUMNS, ROWS, WHOLE = Shard(0), Shard(1), Replicate()
"""Placements of a Linear's weight: its outputs are divided, its inputs are, or neither."""


class Plan(NamedTuple):
    """A class's plan.

    Attributes:
        placements: of each parameter, by name; in a class's plan, of each that a module may have.
        fused: parameters (3 * width, ...) whose rows are those of q, then k, then v. They are stored (3, width, ...),
            which leaves a rank's rows one block.
        counts: the attributes that count heads; the first is the number of query heads.
        single: the module has a list ``heads`` of modules with one head, of which a rank has some.
        joins: out is the heads' results side by side, not a projection of them.
        whole: all ranks compute what is before the heads, up to :meth:`Heads.common`; otherwise the heads read x.
    """

    placements: Mapping[str, Placement]
    fused: frozenset[str] = frozenset()
    counts: tuple[str, ...] = ("num_heads",)
    single: bool = False
    joins: bool = False
    whole: bool = False


def _linears(*names: str, out: str) -> dict[str, Placement]:
    """Linears whose outputs are divided, then one whose inputs are; its bias is added once, to the sum."""
    columns = {f"{name}.{kind}": COLUMNS for name in names for kind in ("weight", "bias")}
    return {**columns, f"{out}.weight": ROWS, f"{out}.bias": WHOLE}


_FUSED = frozenset({"qkv.weight", "qkv.bias"})
_IN_PROJ = frozenset({"multihead_attn.in_proj_weight", "multihead_attn.in_proj_bias"})
_KV = ("num_heads", "num_heads_kv")
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")

PLANS: dict[type, Plan] = {
    nn.MultiHeadAttention: Plan(
        {**_linears("W_query", "W_key", "W_value", out="out_proj"), "sinks": COLUMNS}, counts=_KV
    ),
    nn.Attention: Plan({**_linears("W_q", "W_k", "W_v", out="W_o"), "sinks": COLUMNS}, counts=_KV),
    nn.GroupedQueryAttention: Plan(
        {**_linears("W_query", "W_key", "W_value", out="out_proj"), "sinks": COLUMNS},
        counts=("num_heads", "num_kv_groups"),
    ),
    nn.MultiHeadLatentAttention: Plan(
        {
            **{f"{name}.{kind}": WHOLE for name in _LATENT for kind in ("weight", "bias")},
            **_linears("q_proj", "q_b_proj", "kv_b_proj", out="o_proj"),
        },
        whole=True,
    ),
    book.MultiHeadLatentAttention: Plan(
        {
            **{f"W_DKV.{kind}": WHOLE for kind in ("weight", "bias")},
            **_linears("W_query", "W_UK", "W_UV", out="out_proj"),
        },
        whole=True,
    ),
    book.MultiHeadAttentionWithSWA: Plan(_linears("W_query", "W_key", "W_value", out="out_proj")),
    book.GatedMultiHeadAttention: Plan(_linears("W_query", "W_gate", "W_key", "W_value", out="out_proj")),
    book.MHAEinsum: Plan(
        {
            **dict.fromkeys(("W_query", "W_key", "W_value"), Shard(1)),
            **dict.fromkeys(("bias_q", "bias_k", "bias_v"), Shard(0)),
            **_linears(out="out_proj"),
        }
    ),
    book.MHAPyTorchScaledDotProduct: Plan({**dict.fromkeys(_FUSED, Shard(1)), **_linears(out="proj")}, fused=_FUSED),
    book.MHAPyTorchClass: Plan(
        {
            **dict.fromkeys(_IN_PROJ, Shard(1)),
            **dict.fromkeys(("multihead_attn.bias_k", "multihead_attn.bias_v"), Shard(2)),
            **_linears(out="multihead_attn.out_proj"),
            "proj.weight": WHOLE,
            "proj.bias": WHOLE,
        },
        fused=_IN_PROJ,
        counts=("multihead_attn.num_heads",),
    ),
    book.Ch03_MHA_Wrapper: Plan(_linears(out="out_proj"), counts=(), single=True),
    nn.MultiHeadAttentionWrapper: Plan({}, counts=(), single=True, joins=True),
}


def plan_of(module: object) -> Plan:
    """The plan of the module's class, for the parameters that the module has.

    TypeError if the class has none, or for parameters that are not in it.
    """
    cls = next((cls for cls in type(module).__mro__ if cls in PLANS), None)
    if cls is None or not isinstance(module, Heads):
        names = ", ".join(cls.__name__ for cls in PLANS)
        raise TypeError(f"pyattn: module must be one of {names}, got {type(module).__name__}")
    plan = PLANS[cls]
    present = [name for name, _ in module.named_parameters()]
    for name in present:
        if name not in plan.placements and not (plan.single and name.startswith("heads.")):
            raise TypeError(f"pyattn: module must be a plain {cls.__name__}, got one with a parameter {name}")
    return plan._replace(placements={name: plan.placements[name] for name in present if name in plan.placements})


class Part(NamedTuple):
    """A rank's part of a module.

    Attributes:
        mesh: the ranks.
        plan: the plan of the module's class.
        num_heads: how many query heads the whole has.
        heads: the rank's.
    """

    mesh: DeviceMesh
    plan: Plan
    num_heads: int
    heads: range


def place_of(module: Module, name: str) -> tuple[Module, str]:
    """The submodule that has the attribute of this dotted name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf


def home_of(module: Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that has the parameter of this dotted name, and its name there.

    DistributedDataParallel makes DTensors ordinary attributes.
    """
    owner, leaf = place_of(module, name)
    return vars(owner) if leaf in vars(owner) else owner._parameters, leaf
