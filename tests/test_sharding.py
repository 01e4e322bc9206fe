"""Sharded models in several processes have the bits of one process, and checkpoints for any number of processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from sharded import Net, go_on
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flashopt_compile import FlashAdamW, save
from flashopt_compile.distributed import shards

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("world, kinds", [(2, ["fsdp", "columns"]), (4, ["fsdp", "hsdp", "fsdp and rows"])])
def test_shards_step_to_the_bits_of_one_process(world: int, kinds: list[str], tmp_path: Path):
    run(tmp_path, world, *(f"steps_like_one_process:{kind}" for kind in kinds))


def test_compiled_shards_step_to_the_bits_of_one_process(tmp_path: Path):
    run(tmp_path, 2, "compiled_steps_like_one_process", "trains", "trains_in_parallel")


def test_a_callers_compiled_step_gives_the_bits_of_one_process(tmp_path: Path):
    run(tmp_path, 2, "a_callers_compiled_step")


def test_checkpoints_are_read_by_any_number_of_processes(tmp_path: Path):
    run(tmp_path, 2, "write_checkpoints:fsdp")
    assert checksums(tmp_path / "whole.ckpt") == checksums_of_one_process(tmp_path)
    run(tmp_path, 1, "read_checkpoints:whole")
    run(tmp_path, 3, "steps_like_one_process:fsdp", "read_checkpoints:fsdp")
    run(tmp_path, 4, "read_checkpoints:hsdp")


def test_checkpoints_go_to_tensor_parallelism_and_back(tmp_path: Path):
    run(tmp_path, 4, "steps_like_one_process:fsdp and columns", "write_checkpoints:fsdp and columns")
    run(tmp_path, 2, "read_checkpoints:fsdp", "read_checkpoints:columns", "write_checkpoints:columns")
    run(tmp_path, 4, "read_checkpoints:fsdp and rows")


def checksums_of_one_process(folder: Path) -> dict[str, int]:
    model = Net()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
    go_on(model, optimizer, range(3))
    save(folder / "single.ckpt", model, optimizer, step=3)
    return checksums(folder / "single.ckpt")


def checksums(path: Path) -> dict[str, int]:
    return torch.load(path, weights_only=True)["checksums"]


def test_whole_states_of_any_library_load_into_shards_and_mistakes_are_sentences(tmp_path: Path):
    run(tmp_path, 2, "whole_states", "mistakes")


def test_parameters_may_be_replaced_by_shards_before_the_first_step(tmp_path: Path):
    run(tmp_path, 2, "replaced", "wrongly_replaced")


def test_the_example_continues_on_another_number_of_processes(tmp_path: Path):
    for world, expected in ((2, "step 30"), (1, "resumed at step 30 of 2 processes")):
        command = [*("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))]
        command += [str(ROOT / "examples/fsdp2.py"), str(tmp_path / "run")]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        assert expected in done.stdout


@pytest.mark.parametrize("value", [torch.zeros(2), torch.nn.Parameter(torch.zeros(2)), None, 1.0])
def test_an_unsharded_value_is_its_own_local_part(value: Any):
    assert not shards.is_sharded(value)
    assert shards.local(value) is value
    assert shards.whole(value) is value


def test_states_stay_where_the_parameter_is_offloaded_to(monkeypatch: pytest.MonkeyPatch):
    """The local part is on the CPU and the mesh on another device. Only "meta" is available here."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        parameter = distribute_tensor(torch.zeros(6, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
        monkeypatch.setattr(parameter.device_mesh, "_device_type", "meta")
        sharded = shards.as_sharded(torch.ones(6, 3, dtype=torch.int8), parameter, (6, 3))
        assert shards.is_sharded(sharded)
        assert sharded.shape == (6, 3) and sharded.dtype == torch.int8
        assert shards.placements(sharded) == shards.placements(parameter)
        assert shards.local(sharded).tolist() == [[1, 1, 1]] * 6
    finally:
        distributed.destroy_process_group()


def test_training_without_shards_does_not_import_what_shards_need():
    code = "import sys, flashopt_compile; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
