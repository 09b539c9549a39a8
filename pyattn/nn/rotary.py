"""Positions: ALiBi's slopes and rotary embeddings."""

import math

import torch
from torch import Tensor

from pyattn.options.checks import check_between, check_tensor, check_type, has_values, shown
from pyattn.options.tensor_types import check_outside


def alibi_slopes(
    num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Tensor:
    """ALiBi's slopes, (num_heads,): ``2^(-8 h / n)`` for h from 1 to n = num_heads, if that is a power of 2.

    Otherwise the slopes for the largest power of 2 below num_heads, then every second slope for twice that power.

    Source: Press et al. 2022, "Train Short, Test Long", and the code released with it.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 1 << (num_heads.bit_length() - 1)
    whole = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8 / power)
    between = torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.float64, device=device) * (-4 / power)
    return torch.exp2(torch.cat([whole, between])).to(dtype)


def rotate(
    x: Tensor,
    base: float,
    first: Tensor | None = None,
    interleaved: bool = False,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """Rotary position embedding of ``x`` (B, T, H, D): columns t and t + D / 2 rotate by ``i base^(-2 t / D)``.

    ::

        y_t           =  x_t cos(angle) - x_(t + D / 2) sin(angle)          i = position, from first on
        y_(t + D / 2) =  x_t sin(angle) + x_(t + D / 2) cos(angle)          t = 0 to D / 2 - 1

    ``first``: int64 (B,), the position of each sequence's first token; default: 0. ``positions``: (B or 1, T), those of
    all tokens in its place. ``interleaved``: columns 2t and 2t + 1 rotate together. 16-bit types are rotated in float32
    and rounded once.

    Source: Su et al. 2021, "RoFormer"; the order of columns is rotate-half, as in Llama's checkpoints on Hugging Face.

    >>> rotate(torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2), base=10000.0)[0, :, 0]
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """
    if positions is None:
        check_outside("a rotary embedding without positions=")
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    column = torch.arange(half, dtype=torch.float64, device=x.device)
    frequency = torch.exp2(column * -math.log2(base) / half)  # in a trace, half is a tensor, and c / half float32
    position = torch.arange(x.shape[1], device=x.device) if positions is None else positions
    if positions is None and first is not None:
        position = first[:, None] + position
    angle = position.to(wide)[..., None, None] * frequency.to(wide)
    return turn(x, angle.cos(), angle.sin(), interleaved)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates pairs of columns of ``x`` (..., D) by the angles whose cosines and sines, (..., R / 2), are given.

    The pairs are columns t and t + R / 2 or, interleaved, 2t and 2t + 1. Columns from R on stay. 16-bit types are
    rotated in float32 and rounded once.

    >>> turn(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0]), torch.tensor([1.0]))
    tensor([-2.,  1.,  3.])
    """
    half, wide = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    turning, cos, sin = x[..., : 2 * half].to(wide), cos.to(wide), sin.to(wide)
    left, right = turning[..., :half], turning[..., half:]
    if interleaved:
        left, right = turning[..., ::2], turning[..., 1::2]
    turned = left * cos - right * sin, left * sin + right * cos
    result = (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)
    return result if 2 * half == x.shape[-1] else torch.cat([result, x[..., 2 * half :]], -1)


def turn_heads(
    q: Tensor,
    k: Tensor,
    base: float | None,
    tables: tuple[Tensor, Tensor] | None,
    first: Tensor | None,
    positions: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """``q`` and ``k`` (B, T, H, D), turned by the angles of ``base``, or those of the caller's ``tables``, if any.

    ``first`` and ``positions`` are those of :func:`rotate`.
    """
    if tables is not None:
        cos, sin = (rows_of(t, first, positions, q.shape[1]) for t in tables)
        check_repeated(cos, sin, interleaved)
        pairs = (slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2),)
        cos, sin = (t[(..., *pairs)].unsqueeze(2) for t in (cos, sin))
        return turn(q, cos, sin, interleaved), turn(k, cos, sin, interleaved)
    if base is None:
        return q, k
    return tuple(rotate(t, base, first, interleaved, positions=positions) for t in (q, k))  # type: ignore[return-value]


def rows_of(table: Tensor, first: Tensor | None, positions: Tensor | None, seqlen: int) -> Tensor:
    """(B or 1, seqlen, R): the rows of each token's position in a ``table`` (positions, R), or all of a larger one."""
    if table.dim() == 3:
        return table
    if positions is None and first is None:
        return table[None, :seqlen]
    if positions is None and first is not None:
        positions = first[:, None] + torch.arange(seqlen, device=table.device)
    assert positions is not None
    check_between("the tokens' positions in position_embeddings", positions.flatten(), 0, table.shape[0] - 1)
    return table[positions]


def check_repeated(cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """ValueError unless two columns that turn together have the same angle; no check if values can't be read."""
    if cos.is_cuda or not has_values(cos) or not has_values(sin):
        return
    for table in (cos, sin):
        pairs = table.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(-1 if interleaved else -2)
        if not torch.equal(*pairs):
            layout = "columns 2t and 2t + 1 alike" if interleaved else "two equal halves, cat([angles, angles])"
            raise ValueError(
                f"pyattn: position_embeddings must have {layout}, got others (rotary_interleaved={interleaved})"
            )


def check_tables(
    tables: tuple[Tensor, Tensor] | None,
    x: Tensor,
    head_dim: int,
    rotary: float | None,
    positions: Tensor | None,
    cached: bool,
) -> None:
    """TypeError or ValueError unless ``tables`` are (cos, sin) for the tokens of ``x`` (B, T, columns)."""
    if tables is None:
        return
    if rotary is not None:
        raise ValueError(f"pyattn: position_embeddings must come without rotary, got rotary={rotary}")
    check_type("position_embeddings", tables, tuple, list)
    batch, seqlen = x.shape[:2]
    shapes = [tuple(t.shape) if isinstance(t, Tensor) and t.is_floating_point() else shown(t) for t in tables]
    by_position = isinstance(tables[0], Tensor) and tables[0].dim() == 2
    least = 0 if cached or positions is not None else seqlen  # rows_of checks positions
    rows = [n for n in (tables[0].shape[:1] if by_position else ()) if n >= least]
    columns = tables[0].shape[-1] if isinstance(tables[0], Tensor) and tables[0].dim() else 0
    fits = 0 < columns <= head_dim and columns % 2 == 0 and len(shapes) == 2 and shapes[0] == shapes[1]
    fitting = [(n, columns) for n in rows] + [(n, seqlen, columns) for n in (1, batch)]
    if not fits or shapes[0] not in fitting:
        raise ValueError(
            f"pyattn: position_embeddings must be (cos, sin), each (at least {seqlen}, R), by position, or ({batch} or "
            f"1, {seqlen}, R), with an even R up to head_dim {head_dim}, got {', '.join(map(str, shapes))}"
        )
    if not by_position and positions is not None:
        raise ValueError("pyattn: positions must come with a table by position, got the rows of each token as well")
    for table in tables:
        if table.device != x.device:
            raise ValueError(
                f"pyattn: position_embeddings must be on the device of x, got {table.device} and {x.device}"
            )


def check_positions(
    positions: Tensor | None, rotary: float | None, slopes: Tensor | None, x: Tensor, tables: bool = False
) -> None:
    """TypeError, ValueError or NotImplementedError unless ``positions`` fit the tokens of ``x`` (B, T, columns).

    ``rotary`` and ``slopes`` say which encodings of positions the module has, ``tables`` whether the caller passes any.
    """
    if positions is None:
        return
    check_tensor("positions", positions)
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"pyattn: positions must be int32 or int64, got {positions.dtype}")
    batch, seqlen = x.shape[:2]
    if positions.shape not in ((1, seqlen), (batch, seqlen)):
        raise ValueError(f"pyattn: positions must be ({batch} or 1, {seqlen}), got {tuple(positions.shape)}")
    if positions.device != x.device:
        raise ValueError(f"pyattn: positions must be on the device of x, got {positions.device} and {x.device}")
    if rotary is None and not tables:
        raise ValueError(f"pyattn: positions need a rotary embedding, got rotary={rotary}")
    if slopes is not None:
        raise NotImplementedError("pyattn: positions are not supported with ALiBi, which counts keys, got alibi=True")


def check_angles(position_embeddings: tuple[Tensor, Tensor] | None, x: Tensor, columns: int) -> None:
    """TypeError or ValueError unless they are (cos, sin) of ``columns`` angles of each token of ``x`` (B, T, ...)."""
    if position_embeddings is None:
        return
    check_type("position_embeddings", position_embeddings, tuple)
    batch, seqlen, _ = x.shape
    shapes = [tuple(t.shape) if isinstance(t, Tensor) else shown(t) for t in position_embeddings]
    fitting = (1, seqlen, columns), (batch, seqlen, columns)
    if len(shapes) != 2 or any(shape not in fitting for shape in shapes):
        raise ValueError(
            f"pyattn: position_embeddings must be (cos, sin), each ({batch} or 1, {seqlen}, {columns}), got "
            + ", ".join(map(str, shapes))
        )
