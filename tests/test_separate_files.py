"""Checkpoints whose optimizer and model lie in separate files, as Trainer and Accelerate write them, are read too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import new_model, pair
from torch import Tensor, nn
from torch.nn import Parameter
from training import assert_identical, train

from flashopt_compile import FlashAdamW, FlashOptimizer, cli
from flashopt_compile.checkpoint.archive import Archive
from flashopt_compile.checkpoint.marks import marks_of

safetensors = pytest.importorskip("safetensors.torch")


def trained() -> tuple[nn.Module, FlashOptimizer]:
    """A model whose decayed weights come first in the optimizer, as Trainer has it, and eleven layers of one shape."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(11))).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    groups = [[each for each in model.parameters() if (each.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    optimizer = FlashAdamW([{"params": group} for group in groups], eager=True)
    return model, train(optimizer, range(2))


def write_trainer(folder: Path, model: nn.Module, optimizer: Any) -> Path:
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def write_accelerate(folder: Path, model: nn.Module, optimizer: Any) -> Path:
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    weights = dict(sorted(model.state_dict().items()))
    halves = {
        "model-00001-of-00002.safetensors": list(weights)[:5],
        "model-00002-of-00002.safetensors": list(weights)[5:],
    }
    for name, keys in halves.items():
        safetensors.save_file({key: weights[key] for key in keys}, folder / name)
    where = {key: name for name, keys in halves.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder / "optimizer.bin"


def write_lightning(folder: Path, model: nn.Module, optimizer: Any) -> Path:
    content = {"epoch": 0, "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


def write_own_loop(folder: Path, model: nn.Module, optimizer: Any) -> Path:
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, folder / "mine.pt")
    return folder / "mine.pt"


WRITERS = {
    "trainer": write_trainer,
    "accelerate": write_accelerate,
    "lightning": write_lightning,
    "own loop": write_own_loop,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_weights_come_out_exactly(write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, optimizer = trained()
    source, target = str(write(tmp_path, model, optimizer)), str(tmp_path / "exact.safetensors")
    assert cli.main(["inspect", source, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer"] == "FlashAdamW"
    assert found["step"] == 2
    assert found["health"][0]["nonfinite"] == 0
    assert cli.main(["convert", source, target, "--to", "safetensors-fp32"]) == 0
    assert "equal weights" not in capsys.readouterr().err
    exact, weights = optimizer.get_fp32_model_state_dict(model), safetensors.load_file(target)
    assert weights.keys() == exact.keys()
    assert_identical([weights[key] for key in exact], list(exact.values()))


def test_torch_goes_on_from_what_convert_writes(tmp_path: Path):
    """torch's AdamW takes a state dict of ours without a word and fails at its first step; a converted one works."""
    model, optimizer = trained()
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in optimizer.param_groups])
    theirs.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
    source = write_trainer(tmp_path, model, optimizer)
    assert cli.main(["convert", str(source), str(tmp_path / "torch.pt"), "--to", "torch"]) == 0
    converted = torch.load(tmp_path / "torch.pt")
    exact = nn.Sequential(*(nn.Linear(40, 40) for _ in range(11)))
    exact.load_state_dict(converted["model"])
    groups = [[each for each in exact.parameters() if (each.dim() > 1) is is_matrix] for is_matrix in (True, False)]
    theirs = torch.optim.AdamW([{"params": group} for group in groups])
    theirs.load_state_dict(converted["optimizer"])
    before = {key: value.clone() for key, value in exact.state_dict().items()}
    for parameter in exact.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    assert all((exact.state_dict()[key] != before[key]).any() for key in before)


def test_parameters_with_equal_weights_are_matched_in_order_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(11)]).to(torch.bfloat16)
    optimizer = FlashAdamW(norms.parameters(), lr=1e-6, eager=True)  # moves tails alone
    train(optimizer, range(2))
    source = str(write_trainer(tmp_path, norms, optimizer))
    assert cli.main(["convert", source, str(tmp_path / "x"), "--to", "safetensors-fp32"]) == 0
    assert "11 parameters have equal weights" in capsys.readouterr().err
    exact, weights = optimizer.get_fp32_model_state_dict(norms), safetensors.load_file(tmp_path / "x")
    assert_identical([weights[key] for key in exact], list(exact.values()))  # layer 10 comes after 9


@pytest.mark.parametrize("spoil", ["other weights", "no weights", "no marks"])
def test_what_cannot_be_matched_is_refused_in_a_sentence(
    spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, optimizer = trained()
    folder = write_trainer(tmp_path, model, optimizer)
    expected = {
        "other weights": "has no weight for parameter 3 of the optimizer; were both saved at the same step?",
        "no weights": "has no model, and beside it is none of model.safetensors",
        "no marks": "does not say which parameter is which",
    }
    if spoil == "other weights":
        model.get_parameter("3.weight").data += 1
        safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    elif spoil == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        saved = optimizer.state_dict()
        del saved["flashopt"]["marks"]
        torch.save(saved, folder / "optimizer.pt")
    assert cli.main(["convert", str(folder), str(tmp_path / "x"), "--to", "torch"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert expected[spoil] in error
    assert not (tmp_path / "x").exists()


def test_names_in_the_groups_decide(tmp_path: Path):
    model = new_model()
    optimizer = train(FlashAdamW(model.named_parameters(), eager=True), range(1))
    saved = optimizer.state_dict()
    del saved["flashopt"]["marks"]
    torch.save(saved, tmp_path / "optimizer.pt")
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert Archive.read(tmp_path).parameters == [[name] for name, _ in model.named_parameters()]


def test_a_mark_is_of_values_dtype_and_shape_and_not_of_memory():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(33, 50, generator=random).to(torch.bfloat16)
    others: list[Tensor] = [x.float(), x.t().contiguous(), x.view(50, 33), x + 1, torch.zeros(()), torch.zeros(0, 3)]
    same: list[Tensor] = [x.clone(), Parameter(x), x.t().contiguous().t(), torch.stack([x, x])[1]]
    assert len(set(marks_of([x, *same]))) == 1
    assert len(set(marks_of([x, *others]))) == 1 + len(others)
    assert marks_of([x, x.to("meta")]) == []


def test_marks_are_in_the_stamp_of_a_state_dict():
    model, optimizer = pair()
    assert optimizer.state_dict()["flashopt"]["marks"] == marks_of(list(model.parameters()))
