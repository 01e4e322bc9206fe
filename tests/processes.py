"""The scenarios of the sharding tests, which several processes run together, and how to start them.

python tests/processes.py FOLDER WORLD SCENARIO[:KIND]...   runs functions of this file in WORLD processes, which
leave their files in FOLDER
"""

# pyright: reportPrivateImportUsage=false

import copy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from sharded import SHAPES, Net, assert_same, everything, go_on, of_one_process, sharded
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flashopt_compile import FlashAdamW, FlashSGD, enable_gradient_release, flashoptim_state_dict, load, save


def steps_like_one_process(folder: Path, kind: str) -> None:
    for optimizer_kind, options in ((FlashAdamW, {}), (FlashSGD, {"momentum": 0.9, "master_weight_bits": 32})):
        model = sharded(kind)
        optimizer: Any = optimizer_kind(model.parameters(), lr=1e-2, eager=True, **options)
        go_on(model, optimizer, range(3))
        assert_same(everything(model, optimizer), of_one_process(3, optimizer_kind, **options))
        local = sum(parameter.to_local().nbytes for parameter in model.parameters())
        assert optimizer.memory()["parts"]["weight"] == local
        assert optimizer.health()[0].nonfinite == 0


def compiled_steps_like_one_process(folder: Path) -> None:
    model = sharded()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2)
    optimizer.warmup(verbose=False)
    go_on(model, optimizer, range(3))
    assert_same(everything(model, optimizer), of_one_process(3))


def a_callers_compiled_step(folder: Path) -> None:
    names = ["experts"]
    single = Net(shapes=names)
    reference = FlashSGD(single.parameters(), lr=1e-2, momentum=0.9, eager=True)
    go_on(single, reference, range(3))
    for kind in ("columns", "fsdp"):
        model = sharded(kind, shapes=names)
        optimizer = FlashSGD(model.parameters(), lr=1e-2, momentum=0.9)
        optimizer.step = torch.compile(optimizer.step, fullgraph=True)
        go_on(model, optimizer, range(3))
        assert_same(everything(model, optimizer), everything(single, reference))


def trains(folder: Path) -> None:
    """FSDP2's own forward and backward passes train the model, with the same data on every process."""
    names = [name for name in SHAPES if name != "experts"]  # FSDP2 takes parameters of one dtype
    model, single = sharded(shapes=names), Net(shapes=names)
    optimizers = [FlashAdamW(each.parameters(), lr=1e-2, eager=True) for each in (model, single)]
    for x in (0.5, -1.0, 2.0):
        for each, optimizer in zip((model, single), optimizers, strict=True):
            each(torch.tensor(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(everything(model, optimizers[0]), everything(single, optimizers[1]))


def trains_in_parallel(folder: Path) -> None:
    """Tensor parallelism's own passes train the model. Their sums differ from one process's in the last bits.

    Once such a bit changes a code, single weights differ by up to a step. Over all seeds the mean difference is less
    than a thousandth of the distance trained. A process with wrong gradients would be off by all of that distance.
    """
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    single = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    losses = []
    for each in (model, single):
        optimizer = FlashAdamW(each.parameters(), lr=3e-3, eager=True)
        for _ in range(20):
            loss = (each(inputs) - inputs.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.8 and abs(losses[0] - losses[1]) < 1e-3, losses
    weights = [parameter.full_tensor() for parameter in model.parameters()]
    for mine, other in zip(weights, single.parameters(), strict=True):
        assert (mine - other).abs().mean() < 1e-4
        theirs = mine.clone()
        distributed.broadcast(theirs, 0)
        assert torch.equal(mine, theirs)


def releases(folder: Path) -> None:
    """Gradients are released under FSDP2, whose own hooks call ours with the reduced gradient of the shard."""
    names = [name for name in SHAPES if name != "experts"]  # FSDP2 takes parameters of one dtype
    clipped: dict[str, Any] = {"clip_norm": 1.0, "clip_mode": "exact"}
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ways: list[dict[str, Any]] = [{}, clipped, {"clip_param_norm": 0.5, "clip_value": 1.0}, {"grad_scaler": scaler}]
    for way in ways:
        made = [sharded(shapes=names) for _ in range(2)]
        optimizers = [FlashAdamW(each.parameters(), lr=1e-2, eager=True) for each in made]
        handle = enable_gradient_release(made[0], optimizers[0], **way)
        for x in (0.5, -1.0, 2.0):
            loss = made[0](torch.tensor(x))
            handle.backward(scaler.scale(loss) if "grad_scaler" in way else loss)
            assert all(each.grad is None for each in made[0].parameters())
            made[1](torch.tensor(x)).backward()
            for each in made[1].parameters():
                if "clip_value" in way:
                    each.grad.clamp_(-1.0, 1.0)
                    nn.utils.clip_grad_norm_([each], 0.5)
            if "clip_norm" in way:
                nn.utils.clip_grad_norm_(made[1].parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if "grad_scaler" in way:
                scaler.step(optimizers[0])
                scaler.update()
        assert_same(*(everything(*pair) for pair in zip(made, optimizers, strict=True)))


def releases_with_sums(folder: Path) -> None:
    """Micro-batches and the previous norm give every number of processes the same weights as one."""
    names = ["ragged", "bias", "large"]
    model, single = sharded(shapes=names), Net(shapes=names)
    results = []
    for each in (model, single):
        optimizer = FlashSGD(each.parameters(), lr=1e-2, eager=True)
        handle = enable_gradient_release(each, optimizer, clip_norm=1e4)
        for x in (0.5, -1.0, 2.0, 1.0):
            with handle.accumulate():
                each(torch.tensor(x)).backward()
            each(torch.tensor(-x)).backward()
            optimizer.step()
        results.append(everything(each, optimizer))
    assert_same(*results)


def write_checkpoints(folder: Path, kind: str) -> None:
    """Write checkpoints with torch.distributed.checkpoint, compressed and not, and with our `save`."""
    model = sharded(kind)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True)
    go_on(model, optimizer, range(3))
    save(folder / "whole.ckpt", model, optimizer, step=3)
    for name, compress in (("compressed", True), ("plain", False)):
        optimizer.param_groups[0]["compress_state_dict"] = compress
        dcp.save(content_of(model, optimizer), checkpoint_id=str(folder / name))
    dcp.save(optimizer.get_fp32_model_state_dict(model, sharded=True), checkpoint_id=str(folder / "fp32"))


def content_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": dsd.get_model_state_dict(model), "optimizer": dsd.get_optimizer_state_dict(model, optimizer)}


def read_checkpoints(folder: Path, kind: str) -> None:
    """Read the checkpoints of `write_checkpoints`, which any number of processes may have written."""
    expected, later = of_one_process(3), of_one_process(5)
    for name in ("compressed", "whole.ckpt"):
        model = sharded(kind, seed=1)
        optimizer = FlashAdamW(model.parameters(), lr=0.5, eager=True)
        if name == "whole.ckpt":
            assert load(folder / name, model, optimizer) == {"step": 3}
            assert torch.equal(model.get_buffer("count"), torch.zeros(3))
        else:
            content = content_of(model, optimizer)
            dcp.load(content, checkpoint_id=str(folder / name))
            dsd.set_model_state_dict(model, content["model"])
            dsd.set_optimizer_state_dict(model, optimizer, content["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert_same(everything(model, optimizer), expected)
        go_on(model, optimizer, range(3, 5))
        assert_same(everything(model, optimizer), later)
    read_plain(folder, kind, expected)
    read_fp32(folder, kind)


def read_plain(folder: Path, kind: str, expected: dict[str, Tensor]) -> None:
    """Read fp32 states under torch.optim's names. They come back within the formats' bounds."""
    model = sharded(kind)
    optimizer = FlashAdamW(model.parameters(), compress_state_dict=False, eager=True)
    content = {"optimizer": dsd.get_optimizer_state_dict(model, optimizer)}
    dcp.load(content, checkpoint_id=str(folder / "plain"))
    dsd.set_optimizer_state_dict(model, optimizer, content["optimizer"])
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    for name, value in everything(model, optimizer).items():
        if "codes" in name:
            assert (value.int() - expected[name].int()).abs().max() <= 1, name
        elif name.split()[-1] in ("m", "v", "tail", "step"):
            assert torch.equal(value, expected[name]), name
    go_on(model, theirs, range(3, 4))
    assert all(bool(value.isfinite().all()) for value in everything(model, theirs).values())


def read_fp32(folder: Path, kind: str) -> None:
    """Read the weights alone, as DTensors and as plain tensors."""
    single = Net()
    reference = FlashAdamW(single.parameters(), lr=1e-2, eager=True)
    go_on(single, reference, range(3))
    expected = reference.get_fp32_model_state_dict(single)
    for whole in (False, True):
        model = sharded(kind, seed=1)
        optimizer = FlashAdamW(model.parameters(), eager=True)
        content = optimizer.get_fp32_model_state_dict(model, sharded=True)
        dcp.load(content, checkpoint_id=str(folder / "fp32"))
        if whole:
            content = {
                key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in content.items()
            }
        optimizer.set_fp32_model_state_dict(model, content)
        exported = optimizer.get_fp32_model_state_dict(model)
        assert all(type(value) is Tensor for value in exported.values())
        assert_same(exported, expected)


def whole_states(folder: Path) -> None:
    """Load state dicts of one process, ours and other libraries', into shards, and export shards to FlashOptim."""
    single = Net()
    reference = FlashAdamW(single.parameters(), lr=1e-2, eager=True)
    go_on(single, reference, range(3))
    reference.param_groups[0]["compress_state_dict"] = False
    plain = reference.state_dict()
    reference.param_groups[0]["compress_state_dict"] = True
    for state_dict in (reference.state_dict(), plain, flashoptim_state_dict(reference)):
        model, whole = sharded(), Net()
        optimizer, expected = (FlashAdamW(each.parameters(), eager=True) for each in (model, whole))
        optimizer.load_state_dict(state_dict)
        expected.load_state_dict(state_dict)
        found = everything(model, optimizer)
        assert_same(found, everything(whole, expected))
    theirs, ours = flashoptim_state_dict(expected), flashoptim_state_dict(optimizer)
    for number, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][number][key], value) for key, value in state.items())
    full = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    content = dsd.get_optimizer_state_dict(model, optimizer, options=dsd.StateDictOptions(full_state_dict=True))
    other = FlashAdamW((again := sharded()).parameters(), eager=True)
    dsd.set_optimizer_state_dict(again, other, content, options=full)
    assert_same(everything(again, other), everything(model, optimizer))


def mistakes(folder: Path) -> None:
    """Every mistake raises one sentence on every process and changes nothing."""
    model = sharded()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, eager=True, skip_nonfinite=True)
    go_on(model, optimizer, range(2))
    before = everything(model, optimizer)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    columns = distribute_tensor(torch.zeros(40, 96), mesh, [Shard(1)])
    sentence(
        lambda: FlashAdamW([nn.Parameter(columns)]), "sharded as (Shard(dim=1),); that cuts groups of 32 along its"
    )
    FlashAdamW([nn.Parameter(columns)], quantize=False)
    plain = nn.Parameter(torch.zeros(40, 96))
    alone = FlashAdamW([plain], eager=True)
    plain.grad = columns
    sentence(alone.step, "the gradient of 0.0 is a DTensor; allowed is a Tensor")
    assert not alone.state[plain]["step"]
    save(folder / "good.ckpt", model, optimizer)
    sentence(lambda: save(folder / "missing" / "a.ckpt", model, optimizer), "missing")
    sentence(lambda: save(folder / "a.ckpt", model, torch.optim.SGD(model.parameters())), "optimizer is a SGD")
    damaged = bytearray((folder / "good.ckpt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path = folder / f"damaged{distributed.get_rank()}.ckpt"
    path.write_bytes(damaged)
    sentence(lambda: load(path, model, optimizer), "is damaged")
    wrong = optimizer.state_dict()
    wrong["state"] = {**wrong["state"], 0: {**wrong["state"][0], "tail": wrong["state"][1]["tail"]}}
    sentence(lambda: optimizer.load_state_dict(wrong), "tail of parameter 0 is torch.int8 of shape (37, 70); expected")
    sentence(lambda: optimizer.set_fp32_model_state_dict(model, {}), "lacks")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if distributed.get_rank() == 0:  # an Inf on one process makes all skip the step
        next(model.parameters()).grad.to_local()[0, 0] = torch.inf
    optimizer.step()
    assert_same(everything(model, optimizer), before)


def replaced(folder: Path) -> None:
    """Shard models after their optimizers were made, and replace the parameters, as Accelerate does under FSDP2."""
    model, expected, later = Net(), of_one_process(3), of_one_process(5)
    optimizer = replace(FlashAdamW(model.parameters(), lr=1e-2, eager=True), shard(model))
    weights = everything(model, optimizer)
    assert len(content_of(model, optimizer)["optimizer"]["state"]) == len(SHAPES)  # after a step at lr 0, to have some
    after = everything(model, optimizer)
    assert_same({key: after[key] for key in weights}, weights)
    optimizer.state.clear()
    go_on(model, optimizer, range(3))
    assert_same(everything(model, optimizer), expected)
    dcp.save(content_of(model, optimizer), checkpoint_id=str(folder / "replaced"))

    other = Net(seed=1)
    again = replace(FlashAdamW(other.parameters(), lr=0.5, eager=True), shard(other))
    content = content_of(other, again)
    dcp.load(content, checkpoint_id=str(folder / "replaced"))
    dsd.set_model_state_dict(other, content["model"])
    dsd.set_optimizer_state_dict(other, again, content["optimizer"])
    go_on(other, again, range(3, 5))
    assert_same(everything(other, again), later)


def wrongly_replaced(folder: Path) -> None:
    """What the constructor would refuse is refused at the first step, before anything changes."""
    plain = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(40, 96))])
    optimizer = FlashAdamW(plain.parameters(), eager=True)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    cut: list[Any] = [nn.Parameter(distribute_tensor(each.detach(), mesh, [Shard(1)])) for each in plain]
    replace(optimizer, nn.ParameterList(cut))
    for parameter in cut:
        parameter.grad = torch.ones_like(parameter)
    sentence(optimizer.step, "parameter 0.1 of shape (40, 96) is sharded as (Shard(dim=1),); that cuts groups of 32")
    assert not optimizer.state and not any(parameter.full_tensor().any() for parameter in cut)

    model = Net()
    optimizer = FlashAdamW(model.parameters(), eager=True)
    optimizer.set_fp32_model_state_dict(model, {key: value.float() for key, value in model.state_dict().items()})
    replace(optimizer, shard(model))
    sentence(lambda: go_on(model, optimizer, range(1)), "sharded after the states of 10 parameters were made")


def zero_redundancy(folder: Path) -> None:
    """Each process steps its share of the parameters and keeps only its states."""
    names = [name for name in SHAPES if name != "experts"]  # it takes parameters of one dtype
    single, model = Net(shapes=names), Net(shapes=names)
    reference = FlashAdamW(single.parameters(), lr=1e-2, eager=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), FlashAdamW, lr=1e-2, eager=True)
    for each, stepped in ((single, reference), (model, optimizer)):
        go_on(each, stepped, range(3))
    assert_same(model.state_dict(), single.state_dict())
    assert 0 < len(optimizer.optim.state) < len(names)
    optimizer.consolidate_state_dict(to=0)
    if distributed.get_rank() == 0:
        torch.save(optimizer.state_dict(), folder / "zero.pt")
    distributed.barrier()
    other = copy.deepcopy(model)
    again = ZeroRedundancyOptimizer(other.parameters(), FlashAdamW, lr=0.5, eager=True)
    again.load_state_dict(torch.load(folder / "zero.pt", weights_only=True))
    for each, stepped in ((single, reference), (other, again)):
        go_on(each, stepped, range(3, 5))
    assert_same(other.state_dict(), single.state_dict())


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def replace(optimizer: Any, model: nn.Module) -> Any:
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return optimizer


def sentence(action: Any, expected: str) -> None:
    try:
        action()
    except Exception as error:
        assert expected in str(error) and "\n" not in str(error).strip(), error
    else:
        raise AssertionError(f"nothing was raised: {expected}")


def run(folder: Path, world: int, *scenarios: str) -> None:
    """Run scenarios in new processes and assert that all succeed."""
    command = [sys.executable, __file__, str(folder), str(world), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def work(rank: int, folder: str, world: int, scenarios: tuple[str, ...], store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    for scenario in scenarios:
        name, _, kind = scenario.partition(":")
        globals()[name](Path(folder), *filter(None, [kind]))
        distributed.barrier()
    distributed.destroy_process_group()


def main(folder: str, world: str, *scenarios: str) -> None:
    with tempfile.TemporaryDirectory() as empty:
        arguments = (folder, int(world), scenarios, f"{empty}/store")
        # Forked processes need not import torch again.
        multiprocessing.start_processes(work, arguments, nprocs=int(world), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
