"""`dspark serve --replicas N`: several servers on Ray behind one address."""

import os
import socket
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from dspark.commands.served_model import ServedModel
from dspark.errors import InputError, ModelError
from dspark.serving.app import App, AppConfig, body_limit, with_origins
from dspark.serving.bridge import BridgeConfig
from dspark.serving.gate import Gate
from dspark.serving.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class AppMaker:
    """Loads one replica in its own process."""

    model: ServedModel
    app: AppConfig
    bridge: BridgeConfig

    def __call__(self) -> App:
        """The server around a model that is loaded now."""
        return App(self.model.load(Console(stderr=True))[0], self.app, self.bridge)


def shared_out(model: ServedModel, num_replicas: int) -> tuple[ServedModel, float, float]:
    """The model as one of several takes it, its processors and its GPUs.

    Each has a GPU of its own where there are enough, or else its share of the processors. Raises
    `InputError` for more replicas than GPUs on `--device cuda`.
    """
    options = model.options
    num_gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if num_gpus >= num_replicas:
        return model, 1.0, 1.0
    if options.device == "cuda":
        raise InputError(
            f"replicas is {num_replicas}, but this machine has {num_gpus} GPUs; lower it, or give "
            "--device cpu."
        )
    cores = os.cpu_count() or 1
    share = cores / num_replicas
    threads = max(int(share), 1) if options.threads is None else options.threads
    shared = replace(model, options=replace(options, threads=threads, device="cpu"))
    return shared, min(float(threads), share), 0.0


def serve_replicas(
    console: Console,
    listening: socket.socket,
    model: ServedModel,
    app_config: AppConfig,
    bridge_config: BridgeConfig,
    *,
    num_replicas: int,
) -> None:
    """Start them, say in one line what is served, and answer until a signal comes."""
    try:
        from dspark.cluster.gateway import Gateway
        from dspark.cluster.replicas import RayReplicas, ReplicaConfig
    except ModuleNotFoundError as error:
        raise ModelError(
            f"Replicas need the package {error.name}; install them all with "
            "pip install 'dspark[serve,cluster]'."
        ) from error
    if num_replicas < 1:
        raise InputError(f"replicas is {num_replicas}, but it must be at least 1.")
    model, cpus, gpus = shared_out(model, num_replicas)
    maker = AppMaker(
        model=model,
        # the gateway asks for the key, before anything travels
        app=replace(app_config, api_key=None, cors_origins=()),
        bridge=bridge_config,
    )
    config = ReplicaConfig(
        num_replicas=num_replicas,
        cpus=cpus,
        gpus=gpus,
        max_open=model.max_requests + bridge_config.max_waiting + 1,
        drain_s=bridge_config.drain_s,
    )
    with console.status(f"starting {num_replicas} replicas on Ray"):
        replicas = RayReplicas.start(maker, config)
    try:
        gateway = Gateway(replicas, drain_s=bridge_config.drain_s)
        gate = Gate(
            gateway,
            api_key=app_config.api_key,
            max_body_bytes=app_config.max_body_bytes or body_limit(None),  # theirs is tighter
            on_response=gateway.count_response,
        )
        host, port = listening.getsockname()[:2]
        console.print(
            f"http://{host}:{port}/v1 answers as {app_config.served_name or model.options.target}: "
            f"{num_replicas} replicas with {cpus:g} processors and {gpus:g} GPUs each",
            highlight=False,
            soft_wrap=True,
        )
        Server(with_origins(gate, app_config.cors_origins), gateway).run(sockets=[listening])
    finally:
        replicas.stop()
