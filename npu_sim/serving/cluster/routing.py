"""`PrefixRouter`: sends a request to the replica that has most of the prompt's beginning in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from npu_sim.serving.cluster.messages import RemoteRequest

SLACK = 8  # requests by which a replica may be busier than the idlest one and still be preferred for its cache
REMEMBERED = 1 << 16  # blocks of prompts


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """A router of Ray Serve that remembers to which replica each block of a prompt was sent.

    The replica that was sent the longest beginning of the prompt is preferred, unless it is much busier than another
    one. Otherwise Ray Serve chooses among all replicas by their numbers of requests. The latest `remembered` blocks are
    kept. Blocks are identified by the hashes of the prefix cache, so that prompts of different tenants never match.
    """

    def initialize_state(self, remembered: int = REMEMBERED, **_: Any) -> None:
        self._remembered = remembered
        self._places: OrderedDict[bytes, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        place = self._longest(_digests(pending_request), candidates)
        if place is None or self._is_overloaded(place, candidates):
            return [candidate_replicas]
        return [[candidates[place]], candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        for digest in _digests(pending_request):
            self._places[digest] = replica_id
            self._places.move_to_end(digest)
        while len(self._places) > self._remembered:
            self._places.popitem(last=False)

    def _longest(self, digests: tuple[bytes, ...], candidates: dict[ReplicaID, RunningReplica]) -> ReplicaID | None:
        """The candidate to which the longest known beginning of the prompt was sent; None if there is none."""
        return next((place for x in reversed(digests) if (place := self._places.get(x)) in candidates), None)

    def _is_overloaded(self, place: ReplicaID, candidates: dict[ReplicaID, RunningReplica]) -> bool:
        lengths = {replica: self.replica_queue_len_cache.get(replica) or 0 for replica in candidates}
        return lengths[place] > min(lengths.values()) + SLACK


def _digests(pending: PendingRequest | None) -> tuple[bytes, ...]:
    """Hashes of the blocks of a request's prompt; empty for other calls than requests."""
    asked = pending.args[0] if pending is not None and pending.args else None
    return asked.digests if isinstance(asked, RemoteRequest) else ()
