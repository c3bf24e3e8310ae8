"""`dspark calibrate`, `profile`, `simulate`, `bench load`, `bench plan`: what planning rests on."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    Concurrency,
    Json,
    Rates,
    TaskLimit,
    limit_option,
)
from dspark.commands.bundles import Except
from dspark.commands.checks import at_least_one, file_to_write, folder_to_write
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import (
    Bars,
    coupling_of,
    names_in,
    numbers_in,
    print_report,
    progress_bars,
    say_written,
    whole_numbers_in,
    working,
)
from dspark.errors import InputError
from dspark.options import given, option

_PLAN = "benchmarks.plan.PlanConfig"
_CALIBRATION = "benchmarks.calibration.CalibrationConfig"
_LOAD = "benchmarks.load.config.LoadConfig"
_SIMULATION = "benchmarks.simulation.simulate.SimulationConfig"


def simulate(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="Recorded rounds: --record of bench load, or --results of evaluate or bench load."
        ),
    ],
    cost: Annotated[
        Path,
        typer.Option(
            help="Step costs of the machine: a table of `dspark profile`, or one of vLLM or SGLang."
        ),
    ],
    calibration: Annotated[
        Path | None, typer.Option(help="calibration.json of the drafter.", show_default="none")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Which of the recorded temperatures.", show_default="the only one"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="As in bench load.",
            show_default="auto,none,mtp1, every fixed width, threshold:0.5",
        ),
    ] = None,
    concurrency: Concurrency = "1,2,4,8,16,32,64",
    rates: Rates = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Arrivals, JSON lines with arrival_s, or with timestamp (Mooncake)."),
    ] = None,
    requests: Annotated[int | None, option(_SIMULATION, "requests")] = None,
    replicas: Annotated[int | None, option(_SIMULATION, "replicas")] = None,
    max_requests: Annotated[int | None, option(_SIMULATION, "max_requests")] = None,
    max_new_tokens: Annotated[int | None, option(_SIMULATION, "max_new_tokens")] = None,
    max_step_tokens: Annotated[int | None, option(_SIMULATION, "max_step_tokens")] = None,
    seed: Annotated[int | None, option(_SIMULATION, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Would it pay on that machine? The scheduler over a table of costs and recorded rounds.

    No model runs. Example: dspark simulate rounds.jsonl --cost h200.json --rates 10,50,200
    """
    from dspark import load_session
    from dspark.benchmarks.load.config import default_policies, policy_names
    from dspark.benchmarks.simulation.arrivals import read_trace
    from dspark.benchmarks.simulation.simulate import SimulationConfig
    from dspark.benchmarks.simulation.simulate import simulate as run
    from dspark.benchmarks.simulation.tables import print_simulation

    if not (names_in(concurrency) or names_in(rates) or trace):
        raise InputError("There is no load; give --concurrency, --rates or --trace.")
    machine = load_session.read_machine(
        records, cost=cost, calibration=calibration, temperature=temperature
    )
    names = policy_names(policies) if policies else default_policies(machine.recording.block_size)
    config = SimulationConfig(
        policies=names,
        concurrency=whole_numbers_in("concurrency", concurrency),
        rates=numbers_in("rates", rates),
        **given(
            requests=requests,
            replicas=replicas,
            max_requests=max_requests,
            max_new_tokens=max_new_tokens,
            max_step_tokens=max_step_tokens,
            seed=seed,
        ),
    )
    console = Console(stderr=True)
    with console.status("simulating"):
        report = run(machine, config=config, trace=() if trace is None else read_trace(trace))
    print_report(report, print_simulation, as_json=as_json)


def calibrate(
    data: Annotated[
        list[str],
        typer.Argument(help="Prompts that were not trained on: files or data sets, as in prepare."),
    ],
    options: Annotated[ModelOptions, Except("policy", "copies")],
    temperature: Annotated[
        list[float] | None, option(_CALIBRATION, "temperatures", "--temperature")
    ] = None,
    max_new_tokens: Annotated[int | None, option(_CALIBRATION, "max_new_tokens")] = None,
    seed: Annotated[int | None, option(_CALIBRATION, "seed")] = None,
    limit: TaskLimit = None,
    concurrency: Annotated[
        int, typer.Option(help="Answers decoded together.", callback=at_least_one)
    ] = 8,
    plots: Annotated[
        Path | None,
        typer.Option(help="Directory for PNG pictures after Figure 6.", callback=folder_to_write),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report, and leave the drafter's directory alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit a drafter's confidences to what is accepted; writes calibration.json beside it.

    Each task is judged by the fit of all others, a task alone half by half; the fit of all is kept.

    Example: dspark calibrate gsm8k.jsonl mt-bench.jsonl --limit 30
    """
    from dspark import artifacts, assembly
    from dspark.benchmarks.calibration import CalibrationConfig
    from dspark.benchmarks.calibration import calibrate as run
    from dspark.benchmarks.plots import require_matplotlib, save_calibration
    from dspark.benchmarks.tables import print_calibration

    config = CalibrationConfig(
        **given(temperatures=temperature or None, max_new_tokens=max_new_tokens, seed=seed)
    )
    if plots is not None:
        require_matplotlib()
    folder = assembly.drafter_folder(options.target, options.drafter)
    recorded = assembly.recorded_mode(options.target, [str(folder)], thinking=None, system=None)
    tasks = assembly.read_tasks(data, limit=limit, system=recorded.system)
    console = Console(stderr=True)
    llm = replace(options, drafter=str(folder), policy="fixed").load(
        console, max_requests=concurrency, thinking=recorded.thinking
    )
    with progress_bars(console) as progress:
        report = run(
            llm,
            tasks,
            config=config,
            on_prompt=Bars(progress).update,
        )
    print_report(report, print_calibration, as_json=as_json)
    if not dry_run:
        say_written(console, [artifacts.store_calibration(report.calibration, folder)])
    if plots is not None:
        say_written(console, save_calibration(report, plots))


def profile(
    options: Annotated[ModelOptions, Except("policy", "copies")],
    requests: Annotated[
        int, typer.Option(help="Requests of the largest step.", callback=at_least_one)
    ] = 16,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the table, besides the cache.",
            show_default="none",
            callback=file_to_write,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what steps cost on this machine; --policy auto finds the table from then on.

    It is done by itself when auto is used first. Exit code 1 says that the table is of no use,
    and why.
    """
    from dspark import artifacts
    from dspark.algorithms.cost_faults import find_fault
    from dspark.benchmarks.tables import print_step_cost

    console = Console(stderr=True)
    llm = options.load(console, max_requests=requests, must_draft=True)
    with progress_bars(console) as progress:
        update = partial(Bars(progress).update, "numbers of requests")
        cost = llm.step_cost(is_new=True, on_size=update)
    print_report(cost, print_step_cost, as_json=as_json)
    paths = [artifacts.step_cost_path(cost.fingerprint)]
    if out is not None:
        paths.append(artifacts.store_step_cost(cost, out))
    say_written(console, paths)
    fault = find_fault(cost)
    if fault is not None:
        console.print(f"The table is of no use: {fault.reason}", highlight=False)
        raise typer.Exit(1)


def load(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts: files or data sets as in evaluate, each file (or domain in it) counted "
            "as a domain.",
            show_default="15 built-in ones, math, code and chat",
        ),
    ] = None,
    *,
    options: Annotated[ModelOptions, Except("device", "policy")],
    policies: Annotated[
        str | None,
        typer.Option(
            help="What plans, separated by commas: auto, none, mtp1, fixed:K, threshold:X, "
            "table:R=K,R=K.",
            show_default="auto,none,mtp1, every fixed width, threshold:0.5",
        ),
    ] = None,
    concurrency: Concurrency = "1,2,4,8,16,32,64",
    rates: Rates = "",
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures; the first gives the top-level figures.")
    ] = "1,0",
    repeats: Annotated[int | None, option(_LOAD, "repeats")] = None,
    unit_seconds: Annotated[float | None, option(_LOAD, "unit_s", "--unit-seconds")] = None,
    budget_minutes: Annotated[float | None, option(_LOAD, "budget_minutes")] = None,
    max_new_tokens: Annotated[int | None, option(_LOAD, "max_new_tokens")] = None,
    seed: Annotated[int | None, option(_LOAD, "seed")] = None,
    coupling: Annotated[str | None, option(_LOAD, "coupling")] = None,
    limit: Annotated[int | None, limit_option("Prompts of each domain.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="File that takes each measurement as it ends; the same file goes on.",
            show_default="in the cache until all is measured",
            callback=file_to_write,
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="File that takes rounds for `dspark simulate`.", callback=file_to_write),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Directory for PNG pictures after Figures 7 and 8.", callback=folder_to_write
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The scheduler and fixed policies under load, interleaved: speed of one user and of all.

    After a crash, or when the minutes are up, the same command goes on. Example: dspark bench
    load --concurrency 1,8 --budget-minutes 5 --plots pictures
    """
    from dspark import load_session
    from dspark.benchmarks.load.config import LoadConfig, default_policies, policy_names
    from dspark.benchmarks.load.plots import save_load_plots
    from dspark.benchmarks.load.tables import print_load
    from dspark.benchmarks.plots import require_matplotlib

    values = given(
        repeats=repeats,
        unit_s=unit_seconds,
        budget_minutes=budget_minutes,
        max_new_tokens=max_new_tokens,
        seed=seed,
        coupling=coupling_of(coupling),
    )
    config = LoadConfig(
        policies=policy_names(policies) if policies else default_policies(1),
        concurrency=whole_numbers_in("concurrency", concurrency),
        rates=numbers_in("rates", rates),
        temperatures=numbers_in("temperatures", temperatures),
        **values,
    )
    if plots is not None:
        require_matplotlib()
    if record is not None:
        load_session.check_record(record)
    chats = load_session.read_chats(data or [], limit=limit)
    console = Console(stderr=True)
    llm = options.load(console, max_requests=config.most_requests, must_draft=True)
    if policies is None:
        config = replace(config, policies=default_policies(llm.block_size))
    report = load_session.run_sweep(
        llm,
        load_session.tasks_of(llm, chats),
        config=config,
        weights=load_session.drafter_hash(options.target, options.drafter),
        quantization=options.quantization,
        files=load_session.LoadFiles(results=results, record=record),
        on_unit=lambda unit, measured, done: console.print(
            load_session.unit_sentence(unit, measured.tokens_per_s, done, config.num_units),
            style="dim",
            highlight=False,
        ),
    )
    print_report(report, print_load, as_json=as_json)
    if plots is not None:
        say_written(console, save_load_plots(report, plots))


def plan(
    options: Annotated[ModelOptions, Except("drafter", "device", "threads", "policy", "copies")],
    threads: Annotated[int, typer.Option(help="Processor threads.", rich_help_panel="Model")] = 1,
    requests: Annotated[int | None, option(_PLAN, "requests")] = None,
    block_size: Annotated[int | None, option(_PLAN, "block_size")] = None,
    repeats: Annotated[int | None, option(_PLAN, "repeats")] = None,
    as_json: Json = False,
) -> None:
    """What choosing a budget costs in each step, beside a pass of the target over as many requests.

    Example: dspark bench plan --json
    """
    from dspark.benchmarks.plan import PlanConfig, measure
    from dspark.benchmarks.tables import print_plan

    config = PlanConfig(**given(requests=requests, block_size=block_size, repeats=repeats))
    console = Console(stderr=True)
    with working(console, "loading the model"):
        loaded = replace(options, threads=threads).load_target()
    report = measure(loaded, config=config)
    print_report(report, print_plan, as_json=as_json)
