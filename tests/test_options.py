"""Help texts come from the source of the dataclasses, so they must agree with the classes."""

import dataclasses
import importlib
import inspect

import pytest

from dspark.cli import app
from dspark.llm import LLM
from dspark.models.embedded import DEFAULT_TARGET
from dspark.options import given, owned_field

OWNERS = (
    "core.SamplingParams",
    "benchmarks.demo.DemoConfig",
    "benchmarks.race.RaceConfig",
    "benchmarks.step.StepConfig",
    "benchmarks.evaluation.EvaluationConfig",
    "benchmarks.load.config.LoadConfig",
    "benchmarks.simulation.simulate.SimulationConfig",
    "benchmarks.server_audit.config.AuditConfig",
    "benchmarks.serve.config.ServeBenchConfig",
    "recipes.Recipe",
)


@pytest.mark.parametrize("owner", OWNERS)
def test_the_sentence_and_default_read_from_source_are_those_of_the_class(owner: str) -> None:
    module, name = owner.rsplit(".", 1)
    for field in dataclasses.fields(getattr(importlib.import_module(f"dspark.{module}"), name)):
        found = owned_field(owner, field.name)
        if isinstance(field.default, str | int | float) and not hasattr(field.default, "name"):
            assert found.default == str(field.default), field.name
        if field.default is None:
            assert found.default is None


def test_what_none_means_is_shown_as_the_default() -> None:
    """Nobody can type `None` at a command line."""
    found = owned_field("core.SamplingParams", "top_k")
    assert (found.sentence, found.absent) == ("Keep the k most likely tokens.", "all")
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    for command in (command for group in groups for command in group.registered_commands):
        for name, parameter in inspect.signature(command.callback).parameters.items():
            (option,) = parameter.annotation.__metadata__
            assert "None" not in option.help, f"{command.callback.__name__} {name}"


def test_every_option_has_a_sentence_of_help() -> None:
    """UC-164: an option that no help explains does not exist for a user."""
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    commands = [command for group in groups for command in group.registered_commands]
    assert len(commands) >= 8
    for command in commands:
        assert command.callback.__doc__
        for name, parameter in inspect.signature(command.callback).parameters.items():
            (option,) = parameter.annotation.__metadata__
            assert option.help, f"{command.callback.__name__} {name}"


def test_who_may_quantise_the_weights_may_choose_keys_and_values() -> None:
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    commands = [command for group in groups for command in group.registered_commands]
    names = [inspect.signature(command.callback).parameters for command in commands]
    assert sum("quantization" in each for each in names) > 10
    assert all(("quantization" in each) == ("kv_cache_dtype" in each) for each in names)


def test_the_defaults_shown_for_the_model_are_those_of_load() -> None:
    """The help of --dtype and its like says them in words; LLM.load owns them."""
    parameters = inspect.signature(LLM.load).parameters
    shown = {}
    for command in app.registered_commands:
        for name, parameter in inspect.signature(command.callback).parameters.items():
            shown[name] = parameter.annotation.__metadata__[0].show_default
    assert parameters["target"].default == DEFAULT_TARGET == shown["target"]
    for name in ("drafter", "dtype", "device", "kv_cache_dtype"):
        assert parameters[name].default == shown[name]
    assert parameters["quantization"].default is None
    assert shown["quantization"] == "weights as they are"


def test_only_what_was_given_is_passed_on() -> None:
    assert given(a=None, b=0, c=False, d="") == {"b": 0, "c": False, "d": ""}
