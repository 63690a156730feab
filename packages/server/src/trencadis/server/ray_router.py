"""Ray's router by prefix, which is not in Ray's public modules without vLLM or SGLang."""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class PrefixRouter(prefix_aware_router.PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's router by prefix, without replicas that report that they are full.

    ``record_routing_stats`` of a replica says so, as its ``load``. A request for one of several
    models is routed by its model alone: Ray's router asks twice which replicas have it, and the
    second answer is what is left when these are busy.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas of which Ray takes the one with the shortest queue."""
        router = prefix_aware_router.PrefixCacheAffinityRouter
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            router = PowerOfTwoChoicesRequestRouter
        chosen: list[list[RunningReplica]] = await router.choose_replicas(
            self, candidate_replicas, pending_request
        )
        return chosen

    async def _prefix_match_best_replicas(
        self, pending_request: PendingRequest | None, candidate_replicas: list[RunningReplica]
    ) -> list[list[RunningReplica]]:
        free = [each for each in candidate_replicas if each.routing_stats.get("load", 0.0) < 1.0]
        chosen: list[list[RunningReplica]] = await super()._prefix_match_best_replicas(
            pending_request, free or candidate_replicas
        )
        return chosen
