"""Which part of the KV goes from which prefill rank to which decode rank: pure arithmetic, the same on both sides.

A tensor-parallel replica of R ranks shares out H KV heads by `configs.sharding.heads_of`. With R <= H each rank holds H / R
neighbouring heads; with R > H each head is held by R / H neighbouring ranks, all of them the same bytes. The two sides may
differ in R. Every decode rank gets each of its heads once, from one prefill rank; the ranks that hold the
same head take turns, so that no copy of a head serves all.
"""

from __future__ import annotations

from configs.sharding import heads_of
from protocol.errors import IncompatiblePeerError
from protocol.gang import HeadMove

MAX_RANKS = 1024


def head_moves(prefill_ranks: int, decode_ranks: int, num_kv_heads: int) -> list[HeadMove]:
    """Every move of KV heads from a prefill rank to a decode rank, by decode rank and then by head, each as long as possible.

    The numbers of ranks may come from a peer. Raises IncompatiblePeerError if the heads can't be shared out so.
    """
    if not (1 <= prefill_ranks <= MAX_RANKS and 1 <= decode_ranks <= MAX_RANKS):
        raise IncompatiblePeerError(f"a worker has 1 to {MAX_RANKS} ranks, not {prefill_ranks} to {decode_ranks}")
    moves: list[HeadMove] = []
    for decode_rank in range(decode_ranks):
        wanted = heads_of(decode_rank, decode_ranks, num_kv_heads)
        for destination, head in enumerate(wanted):
            rank = _holder(head, decode_rank, prefill_ranks, num_kv_heads)
            source = head - heads_of(rank, prefill_ranks, num_kv_heads).start
            last = moves[-1] if moves else None
            if last and (last.prefill_rank, last.decode_rank) == (rank, decode_rank):
                moves[-1] = HeadMove(rank, decode_rank, last.source_head, last.destination_head, last.num_heads + 1)
            else:
                moves.append(HeadMove(rank, decode_rank, source, destination, 1))
    return moves


def _holder(head: int, decode_rank: int, prefill_ranks: int, num_kv_heads: int) -> int:
    """The prefill rank that gives this head to this decode rank."""
    if prefill_ranks <= num_kv_heads:
        return head // (num_kv_heads // prefill_ranks)
    replicas = prefill_ranks // num_kv_heads
    return head * replicas + decode_rank % replicas
