"""Where Ray Serve sends a request: to the replica that has read the same beginning before."""

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from dspark.cluster.exchange import Call
from dspark.cluster.prefix_directory import PrefixDirectory


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by `PrefixDirectory`; Ray tries them in that order. The live page and its
    chats go by name, to the first one that lives."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._directory = PrefixDirectory()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One rank for each replica."""
        by_name = {str(replica.replica_id): replica for replica in candidate_replicas}
        call = _call(pending_request)
        if call is not None and call.is_watched:
            return [[by_name[name]] for name in sorted(by_name)]
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in by_name.items()
        }
        order = self._directory.rank("" if call is None else call.beginning, loads)
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """The replica will have these tokens in its cache."""
        super().on_request_routed(pending_request, replica_id, result)
        call = _call(pending_request)
        self._directory.record("" if call is None else call.beginning, str(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its cache is gone."""
        super().on_replica_actor_died(replica_id)
        self._directory.forget(str(replica_id))


def _call(request: PendingRequest | None) -> Call | None:
    found = request.args[0] if request is not None and request.args else None
    return found if isinstance(found, Call) else None
