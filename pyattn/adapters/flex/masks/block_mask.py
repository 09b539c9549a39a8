"""torch's BlockMask, and the mask of one: intervals of keys are counted by their ends, without evaluating pairs."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.adapters.flex.masks.mask_scan import Evaluation, evaluate
from pyattn.adapters.flex.native_forms import Mask, MaskMod, key_ranges_of, mask_of
from pyattn.adapters.flex.trace.evaluation import Lookups
from pyattn.adapters.flex.trace.trace import have_same_bits
from pyattn.masks.key_ranges import by_interval
from pyattn.options.checks import has_values

EVALUATED: WeakKeyDictionary[BlockMask, Evaluation] = WeakKeyDictionary()
"""The last evaluation of each BlockMask's mask_mod, if that has no native meaning. Its blocks cover it."""

RULE = "pyattn: block_mask must list every block that its mask_mod shows, and as full only what it shows entirely"


def blocks_of(
    mask_mod: MaskMod,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    block_size: tuple[int, int],
    separate_full_blocks: bool,
) -> BlockMask:
    """The BlockMask that torch's create_block_mask computes for a mask_mod and ``sizes`` (B, Hq, Sq, Sk)."""
    batch, heads, seqlen_q, seqlen_k = sizes
    mask, evaluation = mask_of(mask_mod), None
    if mask is None:
        evaluation = evaluate(mask_mod, sizes, device)
        mask = evaluation.mask
    some, whole = _visible_blocks(mask, seqlen_q, seqlen_k, device, block_size)
    if some.shape[0] not in (1, batch):
        raise ValueError(f"pyattn: B must be {some.shape[0]}, the number of sequences of the mask_mod, got {batch}")
    whole[:, :, seqlen_q // block_size[0] :] = False  # torch lists no block as full that extends past the last query
    whole[..., seqlen_k // block_size[1] :] = False
    some, whole = (blocks.expand(batch, heads, -1, -1) for blocks in (some, whole))
    part = _ordered(some & ~whole if separate_full_blocks else some)
    full = _ordered(whole) if separate_full_blocks else (None, None)
    block_mask = BlockMask.from_kv_blocks(
        part[0], part[1], full[0], full[1], block_size, mask_mod, seq_lengths=(seqlen_q, seqlen_k)
    )
    _remember(block_mask, mask.reads)
    if evaluation is not None:
        EVALUATED[block_mask] = evaluation
    return block_mask


def mask_in(block_mask: BlockMask, batch: int, heads: int, lookups: Lookups | None = None) -> Mask:
    """The meaning of its mask_mod for that many sequences and query heads; without a mask_mod, of its blocks.

    A mask_mod without a native meaning is evaluated only if it computes something else than at the last evaluation;
    ``lookups`` say what it reads in place of other tensors.

    Raises:
        ValueError: blocks that don't cover the mask; in compiled code, RuntimeError when the code runs.
    """
    mask = mask_of(block_mask.mask_mod)
    if mask is not None:
        check_complete(block_mask, mask)
        return mask
    mask_mod = _blocks_alone(block_mask) if block_mask.mask_mod is noop_mask else block_mask.mask_mod
    mask_mod = mask_mod if lookups is None else _under(lookups, mask_mod)
    sizes, before = (batch, heads, *block_mask.seq_lengths), EVALUATED.get(block_mask)
    now = evaluate(mask_mod, sizes, block_mask.kv_indices.device, before)
    if now is not before or not _is_as_remembered(block_mask, now.mask.reads):
        if not is_complete(block_mask, now.mask):
            raise ValueError(f"{RULE}, got others for lengths {tuple(block_mask.seq_lengths)}")
        EVALUATED[block_mask] = now
        _remember(block_mask, now.mask.reads)
    return now.mask


def _under(lookups: Lookups, mask_mod: MaskMod) -> MaskMod:
    def replaced(*places: Tensor) -> Tensor:
        with lookups:
            return mask_mod(*places)

    return replaced


def check_complete(block_mask: BlockMask, mask: Mask) -> None:
    """ValueError unless the blocks cover the mask; in compiled code, RuntimeError when the code runs.

    The BlockMask remembers the result as long as it keeps this mask_mod, and its blocks and tensors of that their
    values. Compiled code relies on blocks that were checked before it was compiled.
    """
    if torch.compiler.is_compiling():
        if getattr(block_mask, "complete_for", None) is not block_mask.mask_mod or mask.reads:
            torch._assert_async(is_complete(block_mask, mask), RULE)
        return
    if _is_as_remembered(block_mask, mask.reads):
        return
    if not is_complete(block_mask, mask):
        raise ValueError(f"{RULE}, got others for lengths {tuple(block_mask.seq_lengths)}")
    _remember(block_mask, mask.reads)


def _blocks_alone(block_mask: BlockMask) -> MaskMod:
    """The mask_mod of the listed blocks; torch gives ``noop_mask`` to a BlockMask that is made without any."""
    (rows, columns), (seqlen_q, seqlen_k) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    like = torch.empty(-(-seqlen_q // rows), -(-seqlen_k // columns), device="meta")
    listed = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, like)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        listed |= _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, like)
    if listed.all():
        return noop_mask

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = [place if size > 1 else 0 for place, size in zip((b, h), listed.shape[:2], strict=True)]
        return listed[(*first, q_idx // rows, kv_idx // columns)]

    return mask_mod


def is_complete(block_mask: BlockMask, mask: Mask) -> Tensor:
    """Whether the blocks leave out nothing visible, and every block listed as full is fully visible.

    torch's GPU kernels read no other blocks, and don't evaluate the mask_mod within full ones.
    """
    some, whole = _visible_blocks(mask, *block_mask.seq_lengths, block_mask.kv_indices.device, block_mask.BLOCK_SIZE)
    listed = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, some)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return (listed >= some).all()
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, some)
    return ((listed | full) >= some).all() & (full <= whole).all()


def _remember(block_mask: BlockMask, reads: Sequence[Tensor]) -> None:
    """Notes that the blocks cover the mask, whose mask_mod reads these tensors."""
    block_mask.complete_for = block_mask.mask_mod  # type: ignore[attr-defined]
    block_mask.complete_at = [x.clone() for x in (*_blocks(block_mask), *reads)]  # type: ignore[attr-defined]


def _is_as_remembered(block_mask: BlockMask, reads: Sequence[Tensor]) -> bool:
    if getattr(block_mask, "complete_for", None) is not block_mask.mask_mod:
        return False
    before, now = block_mask.complete_at, (*_blocks(block_mask), *reads)  # type: ignore[attr-defined]
    return len(before) == len(now) and all(map(_is_as_before, before, now))


def _blocks(block_mask: BlockMask) -> list[Tensor]:
    """The tensors that list its blocks of keys."""
    of_full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    return [x for x in (block_mask.kv_num_blocks, block_mask.kv_indices, *of_full) if x is not None]


def _is_as_before(before: Tensor, now: Tensor) -> bool:
    return not has_values(now) or have_same_bits(before, now)


def _visible_blocks(
    mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device, block_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Blocks with some visible pair, and blocks where every pair is visible; bool (B or 1, Hq or 1, rows, columns)."""
    rows, columns = block_size
    height = (seqlen_q - torch.arange(0, seqlen_q, rows, device=device)).clamp(max=rows)[:, None]
    if mask.holes:
        width = (seqlen_k - torch.arange(0, seqlen_k, columns, device=device)).clamp(max=columns)
        (holes,) = mask.holes  # a mask_mod is evaluated as a whole
        count = _count_pairs(holes, block_size)
        return count > 0, count == height * width
    begin, end = by_interval(key_ranges_of(mask, seqlen_q, seqlen_k, device)).unbind(-1)
    touched = torch.where(begin < end, -(-end // columns), 0)  # an empty interval touches none
    some = _count_rows(begin // columns, touched, seqlen_k, block_size)
    past = torch.where(end == seqlen_k, -(-end // columns), end // columns)
    whole = _count_rows(-(-begin // columns), past, seqlen_k, block_size)
    return some[:, None] > 0, (whole == height)[:, None]


def _count_pairs(holes: Holes, block_size: tuple[int, int]) -> Tensor:
    """How many pairs of each block are visible, (B or 1, Hq or 1, blocks_q, blocks_k)."""
    batch, heads, seqlen_q, seqlen_k = holes.sizes
    columns = min(block_size[1], seqlen_k)
    blocks_q, blocks_k = -(-seqlen_q // block_size[0]), -(-seqlen_k // columns)
    count = torch.zeros(batch, heads, blocks_q, blocks_k, dtype=torch.int64, device=holes.device)
    for begin, visible in holes.blocks():
        wide = torch.nn.functional.pad(visible, (0, blocks_k * columns - seqlen_k))
        rows = torch.arange(begin, begin + visible.shape[2], device=holes.device) // block_size[0]
        count.index_add_(2, rows, wide.unflatten(-1, (blocks_k, columns)).sum(-1))
    return count


def _count_rows(first: Tensor, past: Tensor, seqlen_k: int, block_size: tuple[int, int]) -> Tensor:
    """How many intervals of each block's rows include it; [first, past) are blocks of keys, each (B or 1, Sq, n)."""
    batch, seqlen_q, _ = first.shape
    blocks_q, blocks_k = -(-seqlen_q // block_size[0]), -(-seqlen_k // block_size[1])
    row = torch.arange(seqlen_q, device=first.device)[:, None] // block_size[0] * (blocks_k + 1)
    begins, ends = ((row + block).flatten(1) for block in (first, torch.maximum(first, past)))
    one = torch.ones_like(begins)
    change = first.new_zeros(batch, blocks_q * (blocks_k + 1))
    change = change.scatter_add(1, begins, one).scatter_add(1, ends, -one)
    return change.reshape(batch, blocks_q, blocks_k + 1).cumsum(-1)[..., :-1]


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks in torch's form: the count of each row, and its columns, followed by the remaining ones."""
    count, order = blocks.sum(-1), blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return count.to(torch.int32), order.to(torch.int32)


def _listed(count: Tensor, columns: Tensor, like: Tensor) -> Tensor:
    """The blocks of torch's form, bool (B, Hq, blocks_q, blocks_k); entries after the first ``count`` are undefined."""
    if columns.shape[-2:] != like.shape[-2:]:
        raise ValueError(
            f"pyattn: block_mask must have {tuple(like.shape[-2:])} blocks, got kv_indices of {tuple(columns.shape)}"
        )
    counted = torch.arange(columns.shape[-1], device=columns.device) < count[..., None]
    places = torch.where(counted, columns, columns.shape[-1]).to(torch.int64)
    blocks = counted.new_zeros(*columns.shape[:-1], columns.shape[-1] + 1)
    return blocks.scatter(-1, places, True)[..., :-1]
