"""Teams: how kernels that process rows divide them among threads.

A team is the warps, or the lanes of a part of a warp, that process one row together; a block has several if rows are
short. The templates take the division as C constants.
"""

from __future__ import annotations

from collections.abc import Iterable

from cuda_compiler.specialization.gpu import WARP
from cuda_compiler.specialization.sizes import Size3, groups, vector_width
from npu_compiler.graph.dtypes import itemsize
from npu_compiler.program.views import View

MOST_WARPS = 32  # of a block
_MANY_ROWS = 1024  # from here on the rows fill the GPU, so each gets fewer threads with more work
_TEAMS = 4
_HELD_PACKS = 4
_BUSY = 16 * 1024  # lanes that are enough to keep many loads on their way
_SMALL_BLOCK = 128


def shared_pack(views: Iterable[View], most: int = 8) -> int:
    """Elements of the last dimension per vector access that all operands allow, at most 16 bytes of the narrowest."""
    present = list(views)
    widest = max(1, 16 // min(itemsize(view.dtype) for view in present))
    return min(most, widest, *(vector_width(view) for view in present))


def teams_for(rows: int, items: int) -> tuple[dict[str, bool | int | float], Size3, Size3]:
    """Constants, grid and block of a kernel in which a team of warps processes each row of `items`."""
    warps = min(groups(items, WARP * (4 if rows >= _MANY_ROWS else 1)), MOST_WARPS)
    teams = _TEAMS if warps == 1 and rows >= _TEAMS else 1
    return (
        {"team_warps": warps, "team_lanes": WARP, "teams": teams},
        (groups(rows, teams), 1, 1),
        (warps * teams * WARP, 1, 1),
    )


def small_teams_for(rows: int, items: int) -> tuple[dict[str, bool | int | float], Size3, Size3]:
    """Constants, grid and block of a kernel whose teams may be parts of a warp.

    With many rows, lanes hold several items.
    """
    held = next((held for held in (4, 2) if rows * items >= held * _BUSY), 1)
    lanes = 1
    while lanes < groups(items, held):
        lanes *= 2
    if lanes >= WARP:
        return teams_for(rows, items)
    teams = _SMALL_BLOCK // lanes
    constants: dict[str, bool | int | float] = {"team_warps": 1, "team_lanes": lanes, "teams": teams}
    return constants, (groups(rows, teams), 1, 1), (_SMALL_BLOCK, 1, 1)


def held_packs(items: int, block: Size3, teams: int | float) -> int:
    """Vectors of a row that a thread keeps in registers between its passes, of the `items` vectors of a whole row."""
    return min(groups(items, block[0] // int(teams)), _HELD_PACKS)
