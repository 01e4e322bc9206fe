"""`flashopt inspect`, `convert` and `verify` work on checkpoints without the programs that wrote them."""

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import new_model, pair, snapshot
from torch import nn
from training import assert_identical, held

from bench.transformer import Plan, Shape, batches, loss_of, standard_library
from bench.transformer import new_model as new_transformer
from flashopt_compile import FlashAdamW, FlashLion, FlashSGD, cli, load, save

KINDS = {"adamw": (FlashAdamW, {}), "lion": (FlashLion, {}), "sgd": (FlashSGD, {"momentum": 0.9})}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Save a checkpoint in the working folder and return its name."""
    monkeypatch.chdir(tmp_path)
    save("run.ckpt", *pair(), step=2)
    return "run.ckpt"


def test_inspect_shows_parts_versions_and_health(run: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["inspect", run]) == 0
    shown = capsys.readouterr()
    for text in (
        "FlashAdamW at step 2",
        "checksums verified",
        "extra: step",
        "optimizer m.codes",
        "saturated",
        "lr 0.001",
    ):
        assert text in shown.out
    assert "read and verify" in shown.err
    assert cli.main(["inspect", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == os.path.getsize(run)
    parts = {part["name"]: part for part in found["parts"] if part["dtype"] == "int8"}
    elements = sum(parameter.numel() for parameter in new_model().parameters())
    assert parts["optimizer tail"]["bytes"] == elements
    assert found["versions"]["file"] == found["versions"]["state dict"] == 1
    assert 0 < found["health"][0]["saturated"] < 0.2
    assert found["health"][0]["nonfinite"] == 0


def test_inspect_counts_nonfinite_values(run: str, capsys: pytest.CaptureFixture[str]):
    model, optimizer = pair()
    model.get_parameter("2.weight").data[3, :5] = torch.nan
    save(run, model, optimizer)
    cli.main(["inspect", run, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert sum(part["nonfinite"] for part in found["parts"]) == 5
    assert found["health"][0]["nonfinite"] > 0


def test_verify_tells_identical_from_different(run: str, capsys: pytest.CaptureFixture[str]):
    shutil.copy(run, "copy.ckpt")
    assert cli.main(["verify", run, "copy.ckpt"]) == 0
    assert "bit-identical: " in capsys.readouterr().out
    model, optimizer = pair()
    model.get_parameter("2.weight").data[0, 0] += 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    save("other.ckpt", model, optimizer, step=3)
    assert cli.main(["verify", run, "other.ckpt"]) == 1
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["model.2.weight"][0] == "1"
    assert float(rows["model.2.weight"][1]) == pytest.approx(0.5, rel=0.01)
    assert rows["param_groups.0.lr"] == ["–", "0.001", "≠", "0.25", "–"]
    assert rows["extra.step"] == ["–", "2", "≠", "3", "–"]
    assert (
        set(rows) == {"entry", "---------", "model.2.weight", "param_groups.0.lr", "extra.step", "3"} or len(rows) == 6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_converting_there_and_back_keeps_weights_exactly_and_states_nearly(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    optimizer_type, options = KINDS[kind]
    model, optimizer = pair(dtype=dtype, kind=optimizer_type, **options)
    save("run.ckpt", model, optimizer, step=2)
    assert cli.main(["convert", "run.ckpt", "same.ckpt", "--to", "flash"]) == 0
    assert cli.main(["verify", "run.ckpt", "same.ckpt"]) == 0
    other, resumed = pair(seed=9, steps=0, dtype=dtype, kind=optimizer_type, **options)
    assert load("same.ckpt", other, resumed) == {"step": 2}
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))

    split = [] if dtype == torch.float32 else ["--dtype", str(dtype).removeprefix("torch.")]
    named = ["--optimizer", optimizer_type.__name__]
    for to, back in (("torch", [*named, *split]), ("flashoptim", named)):
        assert cli.main(["convert", "run.ckpt", to, "--to", to]) == 0
        assert cli.main(["convert", to, "back.ckpt", "--to", "flash", *back]) == 0
        load("back.ckpt", other, resumed)
        assert_identical(
            list(resumed.get_fp32_model_state_dict(other).values()),
            list(optimizer.get_fp32_model_state_dict(model).values()),
        )
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            for name, value in held(optimizer, one).items():
                limit = (0.01 if to == "torch" else 0.02) * value.abs().max()
                assert (value - held(resumed, two)[name]).abs().max() <= limit


def test_safetensors_hold_exact_weights(run: str):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = pair()
    exact = optimizer.get_fp32_model_state_dict(model)
    assert cli.main(["convert", run, "weights.safetensors", "--to", "safetensors-fp32"]) == 0
    found = safetensors.load_file("weights.safetensors")
    assert found.keys() == exact.keys()
    assert_identical([found[key] for key in exact], list(exact.values()))
    assert cli.main(["convert", run, "split.safetensors", "--to", "safetensors-split"]) == 0
    found = safetensors.load_file("split.safetensors")
    assert_identical([found[key] for key in exact], list(model.state_dict().values()))
    assert_identical([found["0.weight.tail"]], [optimizer.state[model.get_parameter("0.weight")]["tail"]])


def test_other_conversions_work_without_safetensors(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert cli.main(["convert", run, "weights.safetensors", "--to", "safetensors-fp32"]) == 2
    assert "safetensors is not installed: pip install" in capsys.readouterr().err
    assert os.listdir() == [run]
    assert cli.main(["convert", run, "torch.ckpt", "--to", "torch"]) == 0


def test_mistakes_are_one_line(run: str, capsys: pytest.CaptureFixture[str]):
    torch.save({"weights": 1}, "odd.pt")
    torch.save({"model": {}, "optimizer": {"state": {}, "param_groups": []}}, "empty.pt")
    model = nn.Linear(4, 4)
    theirs = torch.optim.RMSprop(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": theirs.state_dict()}, "rms.pt")
    cases = [
        (["inspect", "nowhere"], "nowhere does not exist"),
        (["inspect", "odd.pt"], "odd.pt has no model: its keys are ['weights']"),
        (["convert", "empty.pt", "x", "--to", "flash"], "is of the optimizer None; known here are FlashAdamW"),
        (["convert", "rms.pt", "x", "--to", "torch"], "choose one with --optimizer"),
        (["convert", run, "x", "--to", "torch", "--dtype", "bfloat16"], "is ours already; a dtype is for"),
        (["verify", run, "odd.pt"], "odd.pt has no model"),
    ]
    for arguments, sentence in cases:
        assert cli.main(arguments) == 2
        told = [line for line in capsys.readouterr().err.splitlines() if sentence in line]
        assert len(told) == 1
    assert not os.path.exists("x")


@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["itself", "symlink", "hard link"])
def test_a_source_is_overwritten_only_with_force(
    link: Callable[[str, str], None] | None, run: str, capsys: pytest.CaptureFixture[str]
):
    target = run
    if link is not None:
        link(run, target := "link.ckpt")
    before = Path(run).read_bytes()
    assert cli.main(["convert", run, target, "--to", "torch"]) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flashopt convert: ")]
    assert f"{target} is the source itself" in told and "--force" in told
    assert Path(run).read_bytes() == before
    assert cli.main(["convert", run, target, "--to", "torch", "--force"]) == 0
    sizes = [line.split()[2] for line in capsys.readouterr().out.splitlines() if ".ckpt" in line]
    assert len(sizes) == 2 and len(set(sizes)) == 2  # the size before and after
    content = torch.load(target, weights_only=True)
    assert "exp_avg" in content["optimizer"]["state"][0]


def test_other_existing_files_are_overwritten(run: str):
    shutil.copy(run, "other.ckpt")
    assert cli.main(["convert", run, "other.ckpt", "--to", "torch"]) == 0
    assert "exp_avg" in torch.load("other.ckpt", weights_only=True)["optimizer"]["state"][0]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, seed: int) -> list[float]:
    found = []
    for batch in batches(standard_library().training, plan, plan.steps, seed):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_torch_optim_resumes_from_a_converted_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its losses follow FlashAdamW's continued run, not those of an AdamW with new states."""
    monkeypatch.chdir(tmp_path)
    plan = Plan(steps=20, batch=8, shape=Shape(width=32, layers=1, heads=2, context=32))
    model = new_transformer(plan.shape, 0).to(torch.bfloat16)
    optimizer = FlashAdamW(model.parameters(), lr=4e-3, eager=True)
    losses(model, optimizer, plan, seed=0)
    save("run.ckpt", model, optimizer)
    assert cli.main(["convert", "run.ckpt", "torch.pt", "--to", "torch"]) == 0

    def converted(is_resumed: bool) -> list[float]:
        content = torch.load("torch.pt", weights_only=True)
        other = new_transformer(plan.shape, 1)
        other.load_state_dict(content["model"])
        theirs = torch.optim.AdamW(other.parameters(), lr=4e-3)
        if is_resumed:
            theirs.load_state_dict(content["optimizer"])
        return losses(other, theirs, plan, seed=1)

    ours = torch.tensor(losses(model, optimizer, plan, seed=1))
    resumed, anew = (torch.tensor(converted(is_resumed)) for is_resumed in (True, False))
    assert (ours - resumed).abs().max() < 0.01  # nats; it is 0.0013
    assert (ours - anew).abs().max() > 0.05  # 0.13
