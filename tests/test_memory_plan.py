"""`memory_plan` and `flashopt plan` give the bytes that training then takes."""

# pyright: reportPrivateImportUsage=false

import json
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn
from training import give_gradients, params_of

from flashopt_compile import FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, cast_model, cli, memory_plan
from flashopt_compile.planning.plan import Planned

CONFIG = Path(__file__).parent.parent / "examples" / "configs" / "llama-3.1-8b.json"
KINDS: dict[str, tuple[type[FlashOptimizer], dict[str, Any]]] = {
    "adamw": (FlashAdamW, {}),
    "16-bit tails": (FlashAdamW, {"master_weight_bits": 32}),
    "fp32 states": (FlashAdamW, {"quantize": False}),
    "no tails": (FlashAdamW, {"master_weight_bits": None}),
    "lion": (FlashLion, {}),
    "sgd": (FlashSGD, {"momentum": 0.9}),
    "sgd without momentum": (FlashSGD, {}),
}


def model() -> nn.Module:
    """Matrices with and without short groups, a convolution, norms in fp32, and a frozen layer."""
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(100, 257), nn.LayerNorm(257), nn.Linear(257, 64)
    )
    cast_model(layers)
    layers.append(nn.Linear(64, 64).to(torch.bfloat16).requires_grad_(False))
    return layers


def measured(layers: nn.Module, kind: type[FlashOptimizer], options: dict[str, Any]) -> dict[str, Any]:
    optimizer = kind(layers.parameters(), eager=True, **options)
    give_gradients([each for each in params_of(optimizer) if each.requires_grad], 0)
    optimizer.step()
    return optimizer.memory()


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_agrees_with_what_exists_after_a_step(name: str):
    kind, options = KINDS[name]
    with torch.device("meta"):
        plan = memory_plan(model(), kind, **options)
    layers = model()
    frozen = sum(each.nbytes for each in layers.parameters() if not each.requires_grad)
    found = measured(layers, kind, options)
    assert plan.total_bytes == pytest.approx(found["total"] + frozen, rel=0.01)
    expected = {**found["parts"], "weight": found["parts"]["weight"] + frozen}
    assert {name: count for name, count in plan.parts.items() if count} == expected
    assert plan.bytes_per_parameter * plan.parameters == pytest.approx(plan.total_bytes)


def test_release_leaves_the_gradients_out():
    held, released = memory_plan(model()), memory_plan(model(), release=True)
    assert released.parts["gradient"] == 0
    assert released.total_bytes == held.total_bytes - held.parts["gradient"]
    assert released.checkpoint_bytes == held.checkpoint_bytes
    beside = held.alternatives["FlashAdamW, gradients released"]
    assert (beside.total_bytes, beside.bytes_per_parameter) == (released.total_bytes, released.bytes_per_parameter)
    assert "FlashAdamW, gradients released" not in released.alternatives


def test_a_checkpoint_takes_what_is_planned(tmp_path: Path):
    from flashopt_compile import save

    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(torch.bfloat16)
    optimizer = FlashAdamW(layers.parameters(), eager=True)
    give_gradients(params_of(optimizer), 0)
    optimizer.step()
    save(tmp_path / "run.ckpt", layers, optimizer)
    size = (tmp_path / "run.ckpt").stat().st_size
    assert memory_plan(layers).checkpoint_bytes == pytest.approx(size, rel=0.01)


def test_a_plan_of_shards_agrees_with_fsdp2():
    """Run in a new process, in which a process group is pretended."""
    fresh.run(step_shards)


def step_shards() -> None:
    import torch.distributed as distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    for strategy, form, names in (("fsdp2", (8,), ("shard",)), ("hsdp", (2, 4), ("copy", "shard"))):
        layers = nn.Sequential(nn.Linear(100, 257), nn.Linear(257, 64), nn.LayerNorm(64)).to(torch.bfloat16)
        plan = memory_plan(layers, world=8, strategy=strategy, shards=4 if strategy == "hsdp" else None)
        fully_shard(layers, mesh=init_device_mesh("cpu", form, mesh_dim_names=names))
        optimizer = FlashAdamW(layers.parameters(), eager=True)
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert plan.parts == optimizer.memory()["parts"], strategy


def test_the_command_prints_llama(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--config", str(CONFIG), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 8_030_261_248  # as Meta says
    assert plan["bytes_per_parameter"] == pytest.approx(7.125, abs=0.005)
    assert plan["total_bytes"] == pytest.approx(7.125 * 8_030_261_248, rel=0.001)
    assert plan["alternatives"]["torch AdamW mixed"]["bytes_per_parameter"] == 16
    assert plan["alternatives"]["torch AdamW mixed"]["total_bytes"] == 16 * 8_030_261_248
    assert plan["checkpoint_bytes"] / plan["alternatives"]["torch AdamW mixed"]["checkpoint_bytes"] < 0.43
    assert cli.main(["plan", "--config", str(CONFIG), "--device", "24GiB"]) == 0
    shown = capsys.readouterr().out
    assert "8,030,261,248 parameters on one device" in shown
    assert "does not fit into 24.00 GiB: 29.29 GiB too much" in shown
    assert "--strategy fsdp2 --world 4" in shown
    assert cli.main(["plan", "--config", str(CONFIG), "--device", "80 GB"]) == 0
    assert "It fits into 74.51 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp", "tp", "ddp"])
def test_the_changes_that_a_plan_proposes_make_it_fit(strategy: str):
    planned = [Planned("w", (4096 * 64, 4096))]
    limit = 4 * 1024**3
    plan = memory_plan(planned, world=2, strategy=strategy, device_bytes=limit)
    assert plan.fits is (plan.total_bytes <= limit)
    if plan.fits:
        assert plan.changes == ()
        return
    for change in plan.changes:
        assert int(change.rsplit(": ", 1)[1].split()[0]) <= limit


def test_the_command_makes_a_model_of_a_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "planned_here.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(20000, 50000)\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "--model", "planned_here:make", "--optimizer", "lion", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 20000 * 50000 + 50000
    assert plan["bytes_per_parameter"] == pytest.approx(6.0625, abs=0.005)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--params", "many"], "--params is 'many'; allowed is a number of at least 1"),
        (["--params", "8B", "--device", "0GiB"], "--device is '0GiB'; allowed is"),
        (["--params", "8B", "--world", "0"], "world is 0; allowed is a whole number of at least 1"),
        (
            ["--params", "8B", "--world", "8", "--strategy", "hsdp", "--shards", "3"],
            "shards is 3; allowed is a divisor",
        ),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--config", "odd.json"], "model_type of the config is 'odd'; known are llama"),
        (["--config", "poor.json"], "the config of a llama has no 'hidden_size'"),
        (["--model", "torch"], "--model is 'torch'; allowed is package:factory"),
        (["--model", "torch:nothing"], "torch has no function nothing"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("odd.json").write_text('{"model_type": "odd"}')
    Path("poor.json").write_text('{"model_type": "llama"}')
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="model is 7; allowed is"):
        memory_plan(7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="allowed is a class such as FlashAdamW"):
        memory_plan(model(), torch.optim.AdamW)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="FlashAdamW has no option 'momentum'"):
        memory_plan(model(), momentum=0.9)
    with pytest.raises(ValueError, match="strategy is 'zero'; allowed are ddp, fsdp2, hsdp, tp"):
        memory_plan(model(), strategy="zero")
    with pytest.raises(ValueError, match="quantize is 8; allowed is"):
        memory_plan(model(), quantize=8)
