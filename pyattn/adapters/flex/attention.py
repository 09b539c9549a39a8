"""create_block_mask and flex_attention: native on a CPU, torch's own on any other device."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from pyattn.adapters.flex.compiled.masks import mask_in_graph, number
from pyattn.adapters.flex.compiled.scores import attend_in_graph
from pyattn.adapters.flex.masks.block_mask import blocks_of, mask_in
from pyattn.adapters.flex.native_forms import Mask, MaskMod, Score, ScoreMod, check_made, score_of
from pyattn.adapters.flex.scores.attend import attend, native
from pyattn.options.checks import check_size, check_sizes, check_tensor, check_type
from pyattn.options.tensor_types import check_outside

Results = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]
"""out, with return_lse (out, lse), with return_aux (out, AuxOutput)."""


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    **more: Any,
) -> BlockMask:
    """:func:`torch.nn.attention.flex_attention.create_block_mask`; on a CPU, the same blocks in linear memory.

    torch's own function creates every pair: 1 GB for 32,768 queries and keys. Here no pair of a mask_mod of this
    package is evaluated, and the pairs of any other in blocks of rows.

    Args:
        mask_mod: any function.
        B, H: batch and number of query heads, None for 1.
        Q_LEN, KV_LEN: the numbers of queries and keys.
        device: where to create it; default: the accelerator, else the CPU.
        BLOCK_SIZE: of queries and keys, one int or a pair.
        _compile: torch's deprecated argument; it has no effect on a CPU.
        separate_full_blocks: whether blocks that hide nothing are listed separately. torch has it since 2.13.
        **more: torch's further arguments, such as ``compute_dq_write_order``, for GPUs only.

    Raises:
        NotImplementedError: on a CPU, further arguments.
        ValueError: a length below 0, a BLOCK_SIZE below 1, a B that is not the mask_mod's, sizes beyond any memory; a
            mask_mod that returns more than one value for a pair.
        TypeError: other types; a mask_mod that returns no bool tensor; the function ``causal`` itself where the result
            of ``causal()`` belongs.

    >>> from pyattn.adapters.flex import causal
    >>> create_block_mask(causal(), None, None, 256, 256, device="cpu").sparsity()
    25.0
    """
    check_made("mask_mod", mask_mod)
    place = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    if place.type != "cpu":
        if not separate_full_blocks:
            more["separate_full_blocks"] = False
        sizes = B, H, Q_LEN, KV_LEN
        return torch_flex.create_block_mask(mask_mod, *sizes, place, BLOCK_SIZE, _compile, **more)
    if more:
        raise NotImplementedError(f"pyattn: create_block_mask has no {', '.join(more)} on a CPU, got {more}")
    batch, heads = 1 if B is None else B, 1 if H is None else H
    check_sizes(B=batch, H=heads, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    check_type("separate_full_blocks", separate_full_blocks, bool)
    block_size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    check_type("BLOCK_SIZE", block_size, tuple)
    if len(block_size) != 2:
        raise ValueError(f"pyattn: BLOCK_SIZE must be an int or a pair of ints, got {block_size}")
    for size in block_size:
        check_size("each of BLOCK_SIZE", size, least=1)
    block_mask = blocks_of(mask_mod, (batch, heads, Q_LEN, KV_LEN), place, block_size, separate_full_blocks)
    number(block_mask)
    return block_mask


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Results:
    """:func:`torch.nn.attention.flex_attention.flex_attention`; on a CPU native, with a backward.

    Tensors on any other device go to torch's own function with the same arguments; any mods are allowed there.

    Tensors, arrays and numbers that mods read may change between calls, in any way. A call's derivatives see what the
    call read, by copies of up to 4 MB for each mod. A larger tensor that has changed in place raises torch's error,
    unless torch does not count the change, as of ``x.data``.

    Args:
        query: (B, Hq, L, E), float64, float32, bfloat16 or float16, any strides.
        key, value: (B, H, S, E) and (B, H, S, Ev); B may be 1 where block_mask has query's B.
        score_mod: any function; every tensor that it reads, wherever from, gets its gradient. ``softcap`` and ``alibi``
            run in native code. So does a multiple of the score, or ``c * tanh`` of one, plus terms of ``q_idx -
            kv_idx``, of kv_idx or of q_idx alone, each of b and h too, and captured tensors ``[b, h, q_idx, kv_idx]``.
            ``where(visible, score, -inf)`` by indices and captured tensors joins the mask. Any other runs in torch
            operations, block by block in linear memory, on scores in float32 or float64. In a compiled graph, one of
            your own is one operator, wherever it is defined; a graph breaks at one that dynamo can't trace, at an array
            as an index, at ``x.mT`` or ``x, y = z`` of what depends on its arguments, and under
            ``torch.utils.checkpoint``.
        block_mask: from :func:`create_block_mask` or torch's own function. The mask_mod says what is visible, for all
            sequences and heads of query; blocks that leave out some of it are refused. Without a mask_mod, listed
            blocks are visible. A mask_mod of your own is evaluated again only when it computes something else or reads
            other values, however these changed; one that reads more than 4 MB, in each call. Within compiled graphs
            it must come from here. Rows of up to 4 intervals of keys run as such, other masks as bits, S * S bytes.
        scale: finite factor on the scores; default ``1 / sqrt(E)``.
        enable_gqa: whether Hq may be a multiple of H: query head ``h`` reads head ``h // (Hq // H)``.
        return_lse: also return the natural logarithm of the softmax denominator, (B, Hq, L), differentiable.
        kernel_options: torch's options for its GPU kernels. They change how, not what, a kernel computes, so they have
            no effect here; names that torch does not document are refused.
        return_aux: which of lse and max_scores to return; as in torch, a CPU has no max_scores.

    Returns:
        (B, Hq, L, Ev) in query's dtype, differentiable twice in query, key, value and what the score_mod reads. A query
        without a visible key has out 0 and lse -inf, as in torch on a CPU. A score of -inf masks its pair.

    Raises:
        NotImplementedError: nested tensors; max_scores; a score_mod of your own in a transform of torch.func or in
            torch.export; second derivatives of one in a compiled graph.
        RuntimeError: in backward, a mod that is no expression of functions of torch, for example one that changes a
            tensor in place, and that reads something else by then. What TorchScript reads goes unnoticed.
        ValueError: shapes that don't fit, heads that enable_gqa does not group, a block_mask of other lengths,
            return_lse together with return_aux, a mod that returns more than one value for a pair.
        TypeError: other types; a mod that returns no tensor; the function ``softcap`` itself where its result belongs.

    >>> from pyattn.adapters.flex import sliding_window, softcap
    >>> query, key, value = torch.randn(3, 2, 8, 100, 64).unbind()
    >>> block_mask = create_block_mask(sliding_window(16), None, None, 100, 100, device="cpu")
    >>> flex_attention(query, key, value, softcap(50.0), block_mask).shape
    torch.Size([2, 8, 100, 64])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and tensor.is_nested:  # torch's own function refuses them, too
            rule = f"pyattn: {name} must be a dense tensor, as pyattn.attention computes jagged ones"
            raise NotImplementedError(f"{rule}, got a nested tensor of layout {tensor.layout}")
        check_tensor(name, tensor)
    check_made("score_mod", score_mod)
    if query.device.type != "cpu":
        arguments = score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options
        return torch_flex.flex_attention(query, key, value, *arguments, return_aux=return_aux)  # type: ignore[arg-type]
    if score_mod is not None or block_mask is not None:
        check_outside("flex_attention with a score_mod or block_mask")
    wants_lse = _wants_lse(return_lse, return_aux)
    _check_kernel_options(kernel_options)
    _check_sizes(query, key, value, enable_gqa)
    score = None if score_mod is None else score_of(score_mod)
    mask = Mask()
    if block_mask is not None:
        check_type("block_mask", block_mask, BlockMask)
        _check_block_mask(block_mask, query, key)
        in_graph = mask_in_graph(block_mask, *query.shape[:2]) if torch.compiler.is_compiling() else None
        mask = mask_in(block_mask, *query.shape[:2]) if in_graph is None else in_graph
        if key.shape[0] == 1:
            key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    if score_mod is None or score is not None:
        out, lse = native(score or Score(), mask, query, key, value, scale)
    else:
        rows = attend_in_graph(score_mod, query, key, value, mask, scale) if torch.compiler.is_compiling() else None
        out, lse = rows or attend(score_mod, query, key, value, mask, scale)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if wants_lse else None)
    return (out, lse) if wants_lse else out


KERNEL_OPTIONS = frozenset(torch_flex.FlexKernelOptions.__annotations__)
"""The names that torch documents; each may also begin with ``fwd_`` or ``bwd_``."""


def _wants_lse(return_lse: object, return_aux: object) -> bool:
    check_type("return_lse", return_lse, bool)
    if return_aux is None:
        return bool(return_lse)
    check_type("return_aux", return_aux, AuxRequest)
    assert isinstance(return_aux, AuxRequest)
    if return_lse:
        raise ValueError(f"pyattn: return_lse must not be set together with return_aux, got True and {return_aux}")
    if return_aux.max_scores:
        raise NotImplementedError(f"pyattn: return_aux must not ask for max_scores on a CPU, got {return_aux}")
    return return_aux.lse


def _check_kernel_options(kernel_options: object) -> None:
    if kernel_options is None:
        return
    check_type("kernel_options", kernel_options, dict)
    assert isinstance(kernel_options, dict)
    for name in kernel_options:
        if str(name).removeprefix("fwd_").removeprefix("bwd_") not in KERNEL_OPTIONS:
            raise ValueError(f"pyattn: kernel_options must be torch's FlexKernelOptions, got {name!r}")


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: object) -> None:
    check_type("enable_gqa", enable_gqa, bool)
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(
            "pyattn: query, key and value must have 4 dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            "pyattn: query and key must have the same number of heads, or set enable_gqa, "
            f"got {query.shape[1]} and {key.shape[1]}"
        )


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    wanted = (*query.shape[:3], key.shape[2])
    batch, heads, *lengths = shape = block_mask.shape
    if (batch not in (1, wanted[0])) or heads not in (1, wanted[1]) or tuple(lengths) != wanted[2:]:
        raise ValueError(f"pyattn: block_mask must be of shape {wanted}, B and H may be 1, got {tuple(shape)}")
    if block_mask.kv_indices.device != query.device:
        raise ValueError(f"pyattn: block_mask must be on query's device cpu, got {block_mask.kv_indices.device}")
    if query.shape[0] != key.shape[0] and (key.shape[0] != 1 or batch != query.shape[0]):
        raise ValueError(
            "pyattn: query and key must have the same batch size, or 1 for key and query's for block_mask, "
            f"got {query.shape[0]}, {key.shape[0]} and {batch}"
        )
