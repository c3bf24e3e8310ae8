"""Replicas of the server as actors of Ray Serve, which starts them anew when they die."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from dspark.cluster.exchange import Call, Head, exchange
from dspark.cluster.gateway import ReplicaLost
from dspark.errors import InputError
from dspark.serving.app import App

_NAME = "dspark"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How many servers there are, and what each one takes."""

    num_replicas: int = 2
    """Servers behind one address."""
    cpus: float = 1.0
    """Processors that Ray sets aside for each."""
    gpus: float = 0.0
    """GPUs of each."""
    max_open: int = 512
    """Requests that one holds, running and waiting; more wait at the gateway."""
    drain_s: float = 30.0
    """Seconds that running answers get when a replica is told to stop."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise InputError(f"replicas is {self.num_replicas}, but it must be at least 1.")


class Replica:
    """One server in a process of its own. `make_app` loads it there."""

    async def __init__(self, make_app: Callable[[], App]) -> None:  # type: ignore[misc]
        self._app = await asyncio.to_thread(make_app)
        await self._app.service.start()

    async def respond(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The response to one request; see `exchange`."""
        async for item in exchange(self._app, call):
            yield item

    async def metrics(self) -> tuple[str, bytes]:
        """Its name, and its metrics in Prometheus' format."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._app.service.metrics.text()

    async def process(self) -> int:
        """Its process id, so that a test can kill it."""
        return os.getpid()

    async def __del__(self) -> None:
        await self._app.service.stop()


class RayReplicas:
    """`gateway.Replicas` on Ray. Starts a Ray of its own where none is running."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._respond = handle.options(method_name="respond", stream=True)

    @classmethod
    def start(cls, make_app: Callable[[], App], config: ReplicaConfig) -> "RayReplicas":
        """Start them and wait until all answer; Ray of the address in RAY_ADDRESS, or a local
        one."""
        if not ray.is_initialized():
            is_local = "RAY_ADDRESS" not in os.environ
            # Ray's own choice is 15: an answer would wait for whatever else runs on the machine.
            os.environ.setdefault("RAY_worker_niceness", "0")
            own = {"num_cpus": max(os.cpu_count() or 1, 1), "include_dashboard": False}
            ray.init(log_to_driver=False, logging_level="error", **(own if is_local else {}))
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            Replica,
            name="Replica",
            num_replicas=config.num_replicas,
            max_ongoing_requests=config.max_open,
            graceful_shutdown_timeout_s=config.drain_s,
            health_check_period_s=1.0,
            ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
            request_router_config=RequestRouterConfig(
                request_router_class="dspark.cluster.routing:PrefixRouter"
            ),
        )
        return cls(serve.run(deployment.bind(make_app), name=_NAME, route_prefix=None))

    async def respond(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The response of the replica that the router chose. Raises `ReplicaLost`."""
        items = self._respond.remote(call)
        is_over = False
        try:
            async for item in items:
                yield item
            is_over = True
        except RayTaskError:
            is_over = True
            raise
        except RayActorError as error:
            is_over = True
            raise ReplicaLost(str(error).splitlines()[0]) from error
        finally:
            if not is_over:
                items.cancel()

    async def num_running(self) -> int:
        """Replicas in Ray's books that run."""
        status = await asyncio.to_thread(serve.status)
        found = status.applications[_NAME].deployments["Replica"].replica_states
        return int(found.get("RUNNING", 0))

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """Of every replica that answers."""
        return await self._of_all("metrics")

    async def processes(self) -> Sequence[int]:
        """Process ids of all replicas."""
        return await self._of_all("process")

    async def _of_all(self, method: str) -> list:  # type: ignore[type-arg]
        answer = self._handle.broadcast(method)
        found = await answer.results_async(timeout_s=10.0, return_exceptions=True)
        return [item for item in found if not isinstance(item, BaseException)]

    def stop(self) -> None:
        """End all of them, and the Ray that was started for them."""
        serve.shutdown()
        ray.shutdown()
