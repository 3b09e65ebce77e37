"""Fine-tuning takes a route that fits the memory of the devices, and says so."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tiny import write_backbone

from pluralign.cli.main import app
from pluralign.core.errors import UsageError
from pluralign.learning import routes
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.learning.routes import (
    FSDP_FLAGS,
    LLAMA_3_8B,
    ROUTE_OPTIONS,
    Architecture,
    Devices,
    Route,
    Weights,
    choose_route,
    visible_devices,
    with_fitting_route,
)

LLAMA = LLAMA_3_8B.weights
LLAMA_13B = Architecture(32_000, 5120, 13_824, 40, 40, 40).weights
TINY = Architecture(50, 16, 32, 2, 4, 2).weights
CPU = Devices(1, 16e9, gpu=False)
TUNED = FinetuneOptions(backbone="llama")


@pytest.mark.parametrize(
    ("weights", "devices", "route"),
    [
        (LLAMA, Devices(1, 200e9), Route()),
        (LLAMA, Devices(1, 90e9), Route("soap", "bfloat16")),
        (LLAMA, Devices(1, 80e9), Route("soap-one-sided", "bfloat16")),
        (LLAMA, Devices(4, 80e9), Route("soap-one-sided", "bfloat16")),
        (LLAMA, Devices(1, 70e9), Route("adamw", "bfloat16")),
        (LLAMA, Devices(4, 48e9), Route("adamw", shards=4)),
        (LLAMA, Devices(7, 48e9), Route("adamw", shards=4)),
        (LLAMA, Devices(1, 24e9), Route("adamw", lora=True)),
        (LLAMA_13B, Devices(4, 80e9), Route("adamw", shards=4)),
        (LLAMA, CPU, Route("adamw", lora=True)),
        (LLAMA, Devices(4, 80e9, sharded=True), Route("adamw", shards=4)),
        (TINY, CPU, Route()),
        (TINY, Devices(1, 24e9), Route()),
    ],
)
def test_the_first_route_that_fits_is_used(weights: Weights, devices: Devices, route: Route) -> None:
    choice = choose_route(weights, devices, Route(shards=devices.count if devices.sharded else 1))
    assert choice.route == route
    assert choice.changed == (route != Route())
    assert choice.fits == (not (weights == LLAMA and devices == CPU))


def test_the_reason_names_the_memory_that_is_needed_and_that_is_there() -> None:
    reason = choose_route(LLAMA, Devices(1, 24e9), Route()).reason
    assert reason == (
        "LoRA with AdamW in float32 needs about 22 GB; SOAP in float32 needs about 166 GB, and one GPU has 24 GB"
    )
    assert choose_route(LLAMA, CPU, Route()).reason == (
        "LoRA with AdamW in float32 needs about 37 GB, but this machine has 16 GB, so training may run out of memory"
    )


def test_a_named_route_is_kept_and_a_fitting_one_is_suggested() -> None:
    choice = choose_route(LLAMA, Devices(1, 80e9), Route("soap", "bfloat16"), named=True)
    assert (choice.route, choice.fits, choice.changed) == (Route("soap", "bfloat16"), False, False)
    assert choice.reason == (
        "SOAP in bfloat16 needs about 86 GB, but one GPU has 80 GB, so training may run out of memory; one-sided SOAP "
        "in bfloat16 needs about 77 GB (--optimizer soap-one-sided --precision bfloat16)"
    )


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backbone is a Llama-3-8B."""
    monkeypatch.setattr(routes, "weights_of", lambda _: LLAMA)


@pytest.mark.usefixtures("llama")
def test_the_options_of_a_fit_become_those_of_the_route(caplog: pytest.LogCaptureFixture) -> None:
    options, tuning = with_fitting_route(FitOptions(k=3), TUNED, devices=Devices(1, 80e9))
    assert (options.k, options.precision, tuning.optimizer) == (3, "bfloat16", "soap-one-sided")
    assert (tuning.lora, tuning.gradient_checkpointing) == (False, True)
    assert [record.getMessage() for record in caplog.records] == [
        "one-sided SOAP in bfloat16 needs about 77 GB; SOAP in float32 needs about 166 GB, and one GPU has 80 GB."
    ]
    _, tuning = with_fitting_route(FitOptions(), TUNED, devices=Devices(1, 24e9))
    assert (tuning.lora, tuning.optimizer) == (True, "adamw")


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("named", [["optimizer"], ["precision"], ["lora"]])
def test_an_option_that_is_named_with_its_default_value_is_kept(
    named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert with_fitting_route(FitOptions(), TUNED, named, Devices(1, 80e9)) == (FitOptions(), TUNED)
    assert "SOAP in float32 needs about 166 GB, but one GPU has 80 GB" in caplog.text


@pytest.mark.usefixtures("llama")
def test_what_fits_is_neither_changed_nor_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert with_fitting_route(FitOptions(), TUNED, devices=Devices(1, 200e9)) == (FitOptions(), TUNED)
    lora = FinetuneOptions(backbone="llama", lora=True, optimizer="adamw")
    assert with_fitting_route(FitOptions(), lora, devices=Devices(1, 24e9)) == (FitOptions(), lora)
    assert caplog.text == ""


@pytest.mark.usefixtures("llama")
def test_a_route_over_several_gpus_is_given_as_a_command() -> None:
    with pytest.raises(UsageError, match=r"AdamW in float32 on 4 GPUs \(FSDP\) needs about 36 GB") as caught:
        with_fitting_route(FitOptions(), TUNED, devices=Devices(4, 48e9))
    command = str(caught.value).split("  ")[1]
    assert command.startswith("accelerate launch --num_processes 4 --use_fsdp")
    assert command.endswith("-m pluralign fit DATA --backbone llama --optimizer adamw --precision float32")


@pytest.mark.usefixtures("llama")
def test_a_launch_with_fsdp_uses_adamw(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    _, tuning = with_fitting_route(FitOptions(), TUNED, devices=Devices(4, 80e9, sharded=True))
    assert (tuning.optimizer, tuning.lora) == ("adamw", False)
    assert "SOAP needs whole matrices, which FSDP splits" in caplog.text


def test_accelerate_knows_the_options_of_the_launch() -> None:
    launch: Any = importlib.import_module("accelerate.commands.launch")
    parsed = launch.launch_command_parser().parse_args(
        [*Route("adamw", shards=4).launcher[2:], "fit", "DATA", "--optimizer", "adamw"]
    )
    assert (parsed.num_processes, parsed.use_fsdp, parsed.module) == (4, True, True)
    assert (parsed.training_script, parsed.training_script_args) == ("pluralign", ["fit", "DATA", *FIT_FLAGS])
    yaml: Any = importlib.import_module("yaml")
    file = Path(__file__).parents[1] / "configs" / "accelerate_fsdp.yaml"
    config = yaml.safe_load(file.read_text())
    settings = {**config["fsdp_config"], "mixed_precision": config["mixed_precision"]}
    for name, value in zip(FSDP_FLAGS[1::2], FSDP_FLAGS[2::2], strict=True):
        assert str(settings[name[2:]]).lower() == value.lower()


FIT_FLAGS = ["--optimizer", "adamw"]


@pytest.mark.parametrize(("environment", "count"), [({}, 4), ({"WORLD_SIZE": "4"}, 1)])
def test_the_gpus_that_torch_sees_are_the_devices(
    environment: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = importlib.import_module("torch")
    sizes = [80e9, 40e9, 80e9, 80e9]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: type("Properties", (), {"total_memory": sizes[i]})
    )
    assert visible_devices() == Devices(count, 40e9)


def test_without_a_gpu_the_main_memory_counts() -> None:
    devices = visible_devices()
    assert (devices.count, devices.gpu) == (1, False)
    assert devices.bytes_each > 1e9


def test_a_small_model_is_trained_as_before_on_this_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuning = FinetuneOptions(backbone=str(write_backbone(tmp_path)))
    assert with_fitting_route(FitOptions(), tuning) == (FitOptions(), tuning)
    assert caplog.text == ""


def test_the_command_line_keeps_options_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[dict[str, Any]] = []

    def stop(*_: Any, **given: Any) -> None:
        received.append(given)
        raise UsageError("stop")

    monkeypatch.setattr("pluralign.learning.fit.fit", stop)
    group: Any = typer.main.get_command(app)
    config = tmp_path / "run.toml"
    config.write_text('precision = "float32"\n')
    arguments = ["fit", "demo:200", "-o", str(tmp_path / "out"), "--backbone", "b"]
    for more in (["--optimizer", "soap"], ["--config", str(config)], []):
        with pytest.raises(UsageError, match="stop"):
            group(arguments + more, standalone_mode=False)
    options = [{name: given[name] for name in ROUTE_OPTIONS if name in given} for given in received]
    assert options == [{"optimizer": "soap"}, {"precision": "float32"}, {}]
