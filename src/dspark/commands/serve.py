"""`dspark serve`: load, say in one line what is served, and answer until a signal comes."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.bundles import Except
from dspark.commands.model_options import ModelOptions
from dspark.commands.served_model import ServedModel
from dspark.options import given, option

_CYCLE = "engine.cycle.CycleConfig"
_APP = "serving.app.AppConfig"
_BRIDGE = "serving.bridge.BridgeConfig"
_MODEL, _SERVER, _LIMITS = "Model", "Server", "Limits"


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The model that answers: a directory, a hub name, a .gguf file, or the name of a "
            "small one that is already here.",
        ),
    ] = "smollm2-135m",
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    served_name: Annotated[
        str | None,
        option(_APP, "served_name", "--served-name", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="What clients must send on every route but /health. An environment variable hides "
            "it from other users of the machine.",
            envvar="DSPARK_API_KEY",
            show_default="none is asked for",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call, such as https://example.org; may be repeated.",
            show_default="none",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object a line.", rich_help_panel=_SERVER)
    ] = "text",
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_SERVER)
    ] = "info",
    options: Annotated[ModelOptions, Except("target")],
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Thinking mode of a chat template that has one; a request may say otherwise.",
            show_default="the template's",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="Answers that run at once.", rich_help_panel=_LIMITS)
    ] = 16,
    page_size: Annotated[int | None, option(_CYCLE, "page_size", rich_help_panel=_LIMITS)] = None,
    max_waiting: Annotated[
        int | None, option(_BRIDGE, "max_waiting", rich_help_panel=_LIMITS)
    ] = None,
    max_tokens: Annotated[
        int | None, option(_APP, "chat_tokens", "--max-tokens", rich_help_panel=_LIMITS)
    ] = None,
    max_body_bytes: Annotated[
        int | None, option(_APP, "max_body_bytes", rich_help_panel=_LIMITS)
    ] = None,
    deadline: Annotated[
        float | None, option(_BRIDGE, "deadline_s", "--deadline", rich_help_panel=_LIMITS)
    ] = None,
    drain: Annotated[
        float | None, option(_BRIDGE, "drain_s", "--drain", rich_help_panel=_LIMITS)
    ] = None,
    stream_gap: Annotated[
        float | None, option(_BRIDGE, "stream_gap_s", "--stream-gap", rich_help_panel=_LIMITS)
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="Servers behind this address, on Ray (the one of RAY_ADDRESS, or a local one): "
            "one for each device, or for a share of the processors.",
            show_default="one, without Ray",
            rich_help_panel=_SERVER,
        ),
    ] = None,
) -> None:
    """Answer over an OpenAI-compatible API until Ctrl-C or SIGTERM.

    Example: dspark serve smollm2-135m --port 8000
    """
    from dspark.errors import ModelError

    try:
        from dspark.serving.server import listen
    except ModuleNotFoundError as error:
        raise ModelError(
            f"The server needs the package {error.name}; install them all with "
            "pip install 'dspark[serve]'."
        ) from error
    from dspark.serving import logs
    from dspark.serving.app import App, AppConfig
    from dspark.serving.bridge import BridgeConfig
    from dspark.serving.server import Server

    logs.set_up(form=log_format, level=log_level)
    app_config = AppConfig(
        **given(
            served_name=served_name,
            api_key=api_key,
            max_body_bytes=max_body_bytes,
            chat_tokens=max_tokens,
        ),
        cors_origins=tuple(cors_origin or ()),
    )
    bridge_config = BridgeConfig(
        **given(
            max_waiting=max_waiting,
            deadline_s=deadline,
            drain_s=drain,
            stream_gap_s=stream_gap,
        )
    )
    found = listen(host, port)  # before minutes of loading
    console = Console(stderr=True)
    model = ServedModel(
        options=replace(options, target=target),
        max_requests=max_requests,
        page_size=page_size,
        thinking=thinking,
    )
    if replicas is not None:
        from dspark.commands.replicas import serve_replicas

        serve_replicas(console, found, model, app_config, bridge_config, num_replicas=replicas)
        return
    llm, costs = model.load(console)
    app = App(llm, app_config, bridge_config)
    console.print(
        f"http://{host}:{found.getsockname()[1]}/v1 answers as {app.service.name}: "
        f"{app.service.bridge.policy} policy, {costs}, {max_requests} at once"
        + ("" if api_key is None else ", API key required"),
        highlight=False,
        soft_wrap=True,
    )
    Server(app, app.service.bridge).run(sockets=[found])
