"""Checkpoint files are written completely or not at all, and verified before they are loaded."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import go_on, new_model, pair, snapshot
from torch import Tensor, nn
from training import assert_identical

from flashopt_compile import FlashAdamW, FlashLion, FlashSGD, load, save
from flashopt_compile.checkpoint import file

KINDS = {"adamw": (FlashAdamW, {}), "lion": (FlashLion, {}), "sgd": (FlashSGD, {"momentum": 0.9})}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path):
    optimizer_type, options = KINDS[kind]
    model, optimizer = pair(dtype=dtype, kind=optimizer_type, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save(tmp_path / "run.ckpt", model, optimizer, step=2, schedule=schedule.state_dict(), rng=torch.get_rng_state())
    other, resumed = pair(seed=9, steps=0, dtype=dtype, kind=optimizer_type, **options)
    extra = load(tmp_path / "run.ckpt", other, resumed)
    assert extra["step"] == 2
    assert extra["schedule"] == schedule.state_dict()
    assert torch.equal(extra["rng"], torch.get_rng_state())
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
    go_on(other, resumed, range(2, 5))
    go_on(model, optimizer, range(2, 5))
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
    assert os.listdir(tmp_path) == ["run.ckpt"]


@pytest.mark.parametrize(
    "options",
    [
        *({"maximize": True}, {"rounding": "nearest"}, {"quantize": False}, {"compress_state_dict": True}),
        *({"master_weight_bits": bits} for bits in (24, 32, None)),
        *({"decouple_lr": True}, {"skip_nonfinite": True}, {"lr": torch.tensor(0.01)}, {"betas": (0.8, 0.9)}),
    ],
    ids=str,
)
def test_a_run_resumes_bit_for_bit_with_every_option(options: dict[str, Any], tmp_path: Path):
    """The loading optimizer was made without the options."""
    model, optimizer = pair(**options)
    save(tmp_path / "run.ckpt", model, optimizer)
    other, resumed = pair(seed=9)
    load(tmp_path / "run.ckpt", other, resumed)
    go_on(other, resumed, range(2, 4))
    go_on(model, optimizer, range(2, 4))
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))


def test_torch_optimizers_are_saved_and_loaded_too(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    models = [new_model(seed, torch.float32) for seed in (0, 9)]
    one, other = (torch.optim.AdamW(model.parameters()) for model in models)
    go_on(models[0], one, range(2))
    save(path, models[0], one)
    load(path, models[1], other)
    path.write_bytes(b"")  # loaded tensors must not be mapped from the file
    go_on(models[0], one, range(2, 4))
    go_on(models[1], other, range(2, 4))
    assert_identical(snapshot(models[1], other), snapshot(models[0], one))


def test_torch_load_reads_a_file(tmp_path: Path):
    model, optimizer = pair()
    save(tmp_path / "run.ckpt", model, optimizer)
    content = torch.load(tmp_path / "run.ckpt", weights_only=True)
    new_model(5).load_state_dict(content["model"])
    FlashAdamW(new_model(5).parameters(), eager=True).load_state_dict(content["optimizer"])
    assert content["parameters"][0] == ["0.weight"]


def test_a_bf16_file_takes_at_most_45_percent_of_an_fp32_one(tmp_path: Path):
    sizes = []
    kinds: list[tuple[Any, torch.dtype]] = [(FlashAdamW, torch.bfloat16), (torch.optim.AdamW, torch.float32)]
    for kind, dtype in kinds:
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(dtype)
        optimizer = kind(model.parameters(), **({"eager": True} if kind is FlashAdamW else {}))
        go_on(model, optimizer, range(1))
        save(tmp_path / "run.ckpt", model, optimizer)
        sizes.append(os.path.getsize(tmp_path / "run.ckpt"))
    assert sizes[0] / sizes[1] <= 0.45


def test_shared_memory_is_written_once(tmp_path: Path):
    """Small states are views of one memory, tied weights are one tensor, and a view is saved without its base."""
    model, optimizer = pair()
    model.append(nn.Linear(64, 48).to(torch.bfloat16))
    model[-1].weight = model[2].weight
    model.register_buffer("part", torch.zeros(1_000_000)[:10])
    save(tmp_path / "run.ckpt", model, optimizer)
    content = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert content["model"]["2.weight"].data_ptr() == content["model"]["3.weight"].data_ptr()
    assert content["parameters"][4] == ["2.weight", "3.weight"]
    assert os.path.getsize(tmp_path / "run.ckpt") < 100_000


def test_wrapped_models_save_and_load_as_plain_ones(tmp_path: Path):
    model, optimizer = pair()
    save(tmp_path / "run.ckpt", torch.compile(model), optimizer)  # pyright: ignore[reportArgumentType]
    other, resumed = pair(seed=9)
    load(tmp_path / "run.ckpt", other, resumed)
    assert_identical(snapshot(other, resumed), snapshot(model, optimizer))
    save(tmp_path / "run.ckpt", model, optimizer)
    load(tmp_path / "run.ckpt", torch.compile(other), resumed)  # pyright: ignore[reportArgumentType]


def test_values_that_cannot_be_loaded_safely_are_not_saved(tmp_path: Path):
    model, optimizer = pair()
    path = tmp_path / "run.ckpt"
    save(path, model, optimizer, note="before")
    for value in (object(), {1, 2}, [lambda: None], torch.zeros(2).to_sparse()):
        with pytest.raises(ValueError, match=r"extra.thing.* is a .*; a checkpoint holds numbers, strings"):
            save(path, model, optimizer, thing=value)
    assert load(path, model, optimizer) == {"note": "before"}
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_a_damaged_tensor_is_named(tmp_path: Path):
    model, optimizer = pair()
    path = tmp_path / "run.ckpt"
    save(path, model, optimizer)
    raw = bytearray(path.read_bytes())
    weight = model.state_dict()["2.weight"].view(torch.int16).numpy().tobytes()
    raw[raw.index(weight) + 100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"run.ckpt is damaged: model.2.weight is not what was written"):
        load(path, *pair(seed=9))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a checkpoint", os.urandom(1000)])
def test_a_file_of_another_kind_is_refused_in_one_sentence(content: bytes, tmp_path: Path):
    path = tmp_path / "run.ckpt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run.ckpt cannot be read; it is truncated, altered or no checkpoint"):
        load(path, *pair())
    with pytest.raises(FileNotFoundError, match=r"nowhere.ckpt does not exist"):
        load(tmp_path / "nowhere.ckpt", *pair())


def rewritten(path: Path, **changes: Any) -> None:
    content = {**torch.load(path, weights_only=True), **changes}
    content["checksums"] = file.checksums({key: value for key, value in content.items() if key != "checksums"})
    torch.save(content, path)


def test_newer_files_and_files_of_others_are_refused(tmp_path: Path):
    path = tmp_path / "run.ckpt"
    save(path, *pair())
    rewritten(path, flashopt_file=2, library="9.9")
    with pytest.raises(ValueError, match=r"has file format 2, written by version '9.9'; this version reads 1"):
        load(path, *pair())
    torch.save({"model": {}, "optimizer": {}}, path)
    with pytest.raises(ValueError, match=r"was not written by flashopt_compile.save; its keys are"):
        load(path, *pair())
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match=r"holds \[1, 2\]; expected is a dict"):
        load(path, *pair())


def other_model(path: Path) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Linear(64, 40)).to(torch.bfloat16)
    return model, FlashAdamW(model.parameters(), eager=True)


def larger_model(path: Path) -> tuple[nn.Module, Any]:
    model = new_model().append(nn.Linear(48, 8).to(torch.bfloat16))
    return model, FlashAdamW(model.parameters(), eager=True)


def smaller_model(path: Path) -> tuple[nn.Module, Any]:
    model = new_model()[:2]
    return model, FlashAdamW(model.parameters(), eager=True)


def fewer_parameters(path: Path) -> tuple[nn.Module, Any]:
    model = new_model(9)
    return model, FlashAdamW(model[0].parameters(), eager=True)


MISFITS = {
    "other shape": (other_model, r"is of another model: 2.weight is .*\(48, 64\); here it is .*\(40, 64\)"),
    "larger model": (larger_model, r"is of another model: it lacks \['3.weight', '3.bias'\] and has \[\] besides"),
    "smaller model": (smaller_model, r"is of another model: it lacks \[\] and has \['2.weight', '2.bias'\] besides"),
    "other dtype": (lambda _: pair(9, dtype=torch.float16), r"0.weight is torch.bfloat16 .* here it is torch.float16"),
    "other optimizer": (lambda _: pair(9, kind=FlashLion), "is of FlashAdamW; expected is one of FlashLion"),
    "fewer parameters": (fewer_parameters, r"groups of \[6\] parameters; this optimizer has \[2\]"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_file_that_does_not_fit_changes_neither_model_nor_optimizer(misfit: str, tmp_path: Path):
    save(tmp_path / "run.ckpt", *pair())
    make, sentence = MISFITS[misfit]
    model, optimizer = make(tmp_path)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=sentence) as caught:
        load(tmp_path / "run.ckpt", model, optimizer)
    assert "\n" not in str(caught.value)
    assert_identical(snapshot(model, optimizer), before)


def test_a_model_that_fails_halfway_through_loading_is_restored(tmp_path: Path):
    save(tmp_path / "run.ckpt", *pair())
    model, optimizer = pair(seed=9)
    state, before = dict(optimizer.state), snapshot(model, optimizer)

    def refuse(*_: Any) -> None:
        raise RuntimeError("a hook of the user's")

    handle = model[2].register_load_state_dict_post_hook(refuse)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        load(tmp_path / "run.ckpt", model, optimizer)
    handle.remove()
    assert_identical(snapshot(model, optimizer), before)
    assert dict(optimizer.state) == state
    go_on(model, optimizer, range(1))


def test_module_versions_are_saved_and_loaded(tmp_path: Path):
    model, optimizer = pair()
    save(tmp_path / "run.ckpt", model, optimizer)
    other, resumed = pair(seed=9)
    seen: list[Any] = []
    other[1].register_load_state_dict_pre_hook(lambda *arguments: seen.append(arguments[3]["version"]))
    load(tmp_path / "run.ckpt", other, resumed)
    assert seen == [2]


def test_checksums_tell_dtype_shape_and_structure_apart():
    def sums(**content: Any) -> dict[str, int]:
        return file.checksums(content)

    base: Tensor = torch.arange(6, dtype=torch.int32)
    assert sums(a=base) == sums(a=base.clone())
    different = [
        sums(a=base.view(2, 3)),
        sums(a=base.view(torch.float32)),
        sums(b=base),
        sums(a=[base]),
        sums(a=(base,)),
        sums(a=base, c=None),
        sums(a=base, c=1),
        sums(a=base, c=1.0),
        sums(a=base, c="1"),
    ]
    printed = {repr(each) for each in [sums(a=base), *different]}
    assert len(printed) == len(different) + 1
    assert sums(a=OrderedDict(x=1)) == sums(a={"x": 1})
