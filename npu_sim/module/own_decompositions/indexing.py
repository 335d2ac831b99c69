"""Decompositions of ops that pick or write elements by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._decomp import decomposition_table

from npu_sim.module.own_decompositions.table import decomposes


@decomposes("aten.take.default")
def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    picked: torch.Tensor = torch.ops.aten.index.Tensor(x.reshape(-1), [index.reshape(-1)])
    return picked.reshape(index.shape)


@decomposes("aten._unsafe_masked_index_put_accumulate.default")
def masked_index_put(
    x: torch.Tensor, mask: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> torch.Tensor:
    """Apply PyTorch's own decomposition to a copy of the list of indices, since it changes the list."""
    function = decomposition_table[torch.ops.aten._unsafe_masked_index_put_accumulate.default]
    return function(x, mask, list(indices), values)  # type: ignore[no-any-return]


@decomposes("aten.put.default")
def put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    flat = torch.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


@decomposes("aten.index_copy.default")
def index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy into a scalar, which is treated as a vector of one element; other tensors are not handled here."""
    if x.dim():
        raise NotImplementedError("index_copy on more than a scalar")
    return x.reshape(1).index_copy(0, index.reshape(-1), source.reshape(-1)).reshape(())


@decomposes("aten.masked_scatter.default")
def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Replace the elements where the mask is true by the source's elements, one after the other."""
    whole: torch.Tensor
    whole, flags = torch.broadcast_tensors(x, mask)
    if whole.numel() == 0:
        return whole.clone()
    if source.numel() == 0:
        raise NotImplementedError("a source without elements")
    turn = flags.reshape(-1).to(torch.int64).cumsum(0) - 1
    picked = source.reshape(-1).index_select(0, turn.clamp(min=0)).reshape(whole.shape)
    return torch.where(flags, picked, whole)


@decomposes("aten.nonzero_static.default")
def nonzero_static(x: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    """Return the indices of the first `size` elements that are not 0, padded with rows of `fill_value`."""
    if x.dim() == 0 or x.numel() == 0:
        return torch.full((size, x.dim()), fill_value, dtype=torch.int64, device=x.device)
    flags = x.reshape(-1) != 0
    turn = flags.to(torch.int64).cumsum(0) - 1
    target = torch.where(flags & (turn < size), turn, size)
    numbers = torch.arange(x.numel(), device=x.device)
    places = (
        torch.full((size + 1,), -1, dtype=torch.int64, device=x.device).scatter(0, target, numbers).narrow(0, 0, size)
    )
    inner, columns = x.numel(), []
    for extent in x.shape:
        inner //= extent
        columns.append(torch.div(places.clamp(min=0), inner, rounding_mode="floor") % extent)
    return torch.where(places.unsqueeze(1) < 0, fill_value, torch.stack(columns, 1))


@decomposes("aten.embedding_renorm.default")
def embedding_renorm(weight: torch.Tensor, ids: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """Return the table with those rows that `ids` names scaled down to norm `max_norm` if they exceed it."""
    is_named = torch.zeros(weight.size(0), dtype=torch.bool, device=weight.device).scatter(0, ids.reshape(-1), True)
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scale = torch.where(is_named & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    return weight * scale.unsqueeze(1)


@decomposes("aten._embedding_bag.default aten._embedding_bag_forward_only.default")
def embedding_bag(
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sums (mode 0), means (1) or maxima (2) of the rows of each bag, which begins at its offset.

    The other three results serve gradients, and PyTorch does not specify them. Here they are each element's bag, the
    bags' sizes, and for maxima the ids of their rows.
    """
    count, bags = ids.numel(), offsets.numel() - int(include_last_offset)
    if count == 0 or bags == 0:
        raise NotImplementedError("no bags, or nothing in them")
    places = torch.arange(count, device=ids.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets.narrow(0, 0, bags), places, right=True) - 1
    rows, is_kept = torch.nn.functional.embedding(ids, weight), ids != padding_idx
    sizes = torch.zeros(bags, dtype=torch.int64, device=ids.device).index_add(0, bag, is_kept.to(torch.int64))
    width = weight.size(1)
    empty = weight.new_zeros(bags, width)
    if mode == 2:
        target = torch.where(is_kept, bag, bags).unsqueeze(1).expand(count, width)
        slots = weight.new_zeros(bags + 1, width)
        result = slots.scatter_reduce(0, target, rows, "amax", include_self=False)
        is_largest = rows == result.index_select(0, target[:, 0])
        first = torch.where(is_largest, places.to(torch.int64).unsqueeze(1), count - 1)
        first_places = torch.zeros(bags + 1, width, dtype=torch.int64, device=ids.device)
        first_places = first_places.scatter_reduce(0, target, first, "amin", include_self=False)
        largest = ids.to(torch.int64).index_select(0, first_places.reshape(-1)).reshape(first_places.shape)
        is_filled = (sizes > 0).unsqueeze(1)
        result, largest = result.narrow(0, 0, bags), largest.narrow(0, 0, bags)
        return result, bag.to(ids.dtype), sizes.to(ids.dtype), torch.where(is_filled, largest, 0).to(ids.dtype)
    if weight.dtype in (torch.float16, torch.bfloat16):
        rows, empty = rows.float(), empty.float()  # as PyTorch does: 16 bits may not hold a product that is summed
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1).to(rows.dtype)
    rows = torch.where(is_kept.unsqueeze(1), rows, 0.0)
    total = empty.index_add(0, bag, rows)
    if mode == 1:
        total = total / sizes.clamp(min=1).unsqueeze(1).to(total.dtype)
    total = total.to(weight.dtype)
    return total, bag.to(ids.dtype), sizes.to(ids.dtype), sizes.to(ids.dtype)
