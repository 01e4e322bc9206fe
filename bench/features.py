"""What FlashAdamW and other packages' memory-lean AdamW can do, tried on CPUs: the feature table of the README.

python -m bench.features [--only NAME]   each trial is a process of its own; reasons for "no" follow the table
"""

# pyright: reportPrivateImportUsage=false

import argparse
import contextlib
import copy
import importlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from bench.machine import describe_machine
from flashopt_compile import FlashAdamW

ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
WAIT_S = 900  # for a trial


def flashoptim(params: Any, **options: Any) -> Any:
    return importlib.import_module("flashoptim").FlashAdamW(params, **options)


def torchao(params: Any, **options: Any) -> Any:
    return importlib.import_module("torchao.optim").AdamW8bit(params, bf16_stochastic_round=True, **options)


def bitsandbytes(params: Any, **options: Any) -> Any:
    return importlib.import_module("bitsandbytes").optim.AdamW8bit(params, **options)


def optimi(params: Any, **options: Any) -> Any:
    return importlib.import_module("optimi").AdamW(params, kahan_sum=True, **options)


def heavyball(params: Any, **options: Any) -> Any:
    return importlib.import_module("heavyball").AdamW(params, ecc="bf16+8", param_ecc="bf16+8", **options)


# What a package is called on PyPI, and how it makes an AdamW for 16-bit weights.
MAKERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "flashopt-compile": ("flashopt-compile", FlashAdamW),
    "flashoptim": ("flashoptim", flashoptim),
    "torchao": ("torchao", torchao),
    "bitsandbytes": ("bitsandbytes", bitsandbytes),
    "optimi": ("torch-optimi", optimi),
    "heavyball": ("heavyball", heavyball),
}


def weight_of(*shape: int, value: float | None = None) -> nn.Parameter:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=random) if value is None else torch.full(shape, value)
    return nn.Parameter(values.to(torch.bfloat16))


def give_gradient(weight: nn.Parameter, step: int, size: float = 1.0) -> None:
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)) * size
    weight.grad = values.to(weight.dtype)


def advance(optimizer: Any, weight: nn.Parameter, steps: Iterable[int], size: float = 1.0) -> Tensor:
    for step in steps:
        give_gradient(weight, step, size)
        optimizer.step()
    return weight.detach().clone()


def memories(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every plain tensor in a state, each memory once."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from memories(each, seen)
    elif (flatten := getattr(value, "__tensor_flatten__", None)) is not None:
        yield from memories([getattr(value, name) for name in flatten()[0]], seen)
    elif isinstance(value, Tensor) and value.data_ptr() not in seen:
        seen.add(value.data_ptr())
        yield value


def count_bytes(make: Callable[..., Any]) -> str:
    weight = weight_of(2048, 2048)
    optimizer = make([weight], lr=1e-3, **ADAMW)
    advance(optimizer, weight, range(2))
    seen = {weight.data_ptr()}
    held = sum(each.nbytes for each in memories(dict(optimizer.state), seen))
    return f"{(2 * weight.nbytes + held) / weight.numel():.2f}"  # with a gradient, which some take away


def step_on_a_cpu(make: Callable[..., Any]) -> str:
    weight = weight_of(64, 64)
    before = weight.detach().clone()
    after = advance(make([weight], lr=0.1, **ADAMW), weight, range(3))
    assert after.isfinite().all() and (after != before).any(), "the weight did not move"
    return "yes"


def keep_small_updates(make: Callable[..., Any]) -> str:
    """Displacement of weights of 1 by 4,000 steps of 1e-5, a hundredth of what bf16 resolves, over the exact one."""
    weight = weight_of(64, 64, value=1.0)
    optimizer = make([weight], lr=1e-5, **ADAMW)
    for _ in range(4000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return f"{(1 - weight.detach().float().mean()) / 0.04:.2f}×"


def scale_freely(make: Callable[..., Any]) -> str:
    """Displacement by steps whose gradients are around 1e-7 and 1e5, over that of exact AdamW in fp32."""
    found = []
    for size in (1e-7, 1e5):
        options = {**ADAMW, "eps": 1e-12, "lr": 0.01}
        ours, exact = weight_of(64, 64, value=0.0), nn.Parameter(torch.zeros(64, 64))
        moved = advance(make([ours], **options), ours, range(30), size)
        theirs = advance(torch.optim.AdamW([exact], **options), exact, range(30), size)
        found.append(f"{moved.float().norm() / theirs.norm():.2f}×")
    return ", ".join(found)


def resume_exactly(make: Callable[..., Any]) -> str:
    weight = weight_of(96, 100)
    optimizer = make([weight], lr=1e-2, **ADAMW)
    held = advance(optimizer, weight, range(5))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = nn.Parameter(held.clone())
    resumed = make([other], lr=1e-2, **ADAMW)
    resumed.load_state_dict(torch.load(file, weights_only=False))
    torch.manual_seed(0)
    expected = advance(optimizer, weight, range(5, 10))
    torch.manual_seed(0)
    assert torch.equal(advance(resumed, other, range(5, 10)), expected), "other bits after resuming"
    return "yes"


def copy_and_pickle(make: Callable[..., Any]) -> str:
    weight = weight_of(64, 64)
    optimizer = make([weight], lr=1e-2, **ADAMW)
    advance(optimizer, weight, range(2))
    copy.deepcopy(optimizer)
    pickle.loads(pickle.dumps(optimizer))
    return "yes"


def give_states_to_torch(make: Callable[..., Any]) -> str:
    """Whether torch.optim.AdamW goes on from the state dict, made for it where the package has such an option."""
    weight = weight_of(64, 64)
    try:
        optimizer = make([weight], lr=1e-2, compress_state_dict=False, **ADAMW)
    except TypeError:
        optimizer = make([weight], lr=1e-2, **ADAMW)
    advance(optimizer, weight, range(3))
    exact = nn.Parameter(weight.detach().float())
    theirs = torch.optim.AdamW([exact])
    theirs.load_state_dict(optimizer.state_dict())
    advance(theirs, exact, range(3, 5))
    state = theirs.state[exact]
    assert state["exp_avg"].dtype is torch.float32, f"exp_avg is {state['exp_avg'].dtype}"
    return "yes"


def compile_in_a_graph(make: Callable[..., Any]) -> str:
    weight = weight_of(64, 64)
    optimizer = make([weight], lr=1e-2, **ADAMW)
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    step = torch.compile(optimizer.step, fullgraph=True, backend=counting)
    for number in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
        give_gradient(weight, number)
        step()
    return f"yes, {graphs} graph{'s' if graphs > 1 else ''} for 6 rates"


def step_transposed(make: Callable[..., Any]) -> str:
    straight = weight_of(96, 64)
    turned = nn.Parameter(straight.detach().t().contiguous().t())
    results = []
    for weight in (straight, turned):
        torch.manual_seed(0)
        results.append(advance(make([weight], lr=1e-2, **ADAMW), weight, range(5)).float())
    apart = (results[0] - results[1]).norm() / (results[0] - weight_of(96, 64).float()).norm()
    assert apart < 0.1, f"differs from the contiguous one by {apart:.2f} of the displacement"
    return "yes"


def work(rank: int, name: str, rows: int, port: int, folder: str, lines: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, rows), nn.Linear(rows, 64)).to(torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = MAKERS[name][1](model.parameters(), lr=1e-3, **ADAMW)
        model(torch.randn(8, 128, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        made.append((model, optimizer))
    lines.put("steps")
    weights, states = get_state_dict(*made[0])
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    weights, states = get_state_dict(*made[1])
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(*made[1], model_state_dict=weights, optim_state_dict=states)
    lines.put("saves")
    distributed.destroy_process_group()


def sharded(name: str, rows: int) -> tuple[str, str]:
    """How far two processes came, and why no further."""
    import torch.multiprocessing as processes

    lines, reason = processes.get_context("spawn").SimpleQueue(), ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(work, (name, rows, 29000 + (os.getpid() + rows) % 1000, folder, lines), 2)
        except Exception as error:
            reason = str(error).strip().splitlines()[-1]
    done = []
    while not lines.empty():
        done.append(lines.get())
    both = [each for each in ("steps", "saves") if done.count(each) == 2]
    return (both or ["nothing"])[-1], reason


def shard(make: Callable[..., Any]) -> str:
    """FSDP2 on two processes with uneven or even shards, and torch.distributed.checkpoint there and back."""
    name = next(name for name, (_, each) in MAKERS.items() if each is make)
    answers = {"saves": "yes", "steps": "steps, not saved"}
    for rows, shards in ((257, ""), (256, ", even shards only")):
        came, reason = sharded(name, rows)
        if came in answers:
            return answers[came] + shards
    raise RuntimeError(reason)


FIRST = "steps on a CPU"  # what does not, cannot be tried any further here
TRIALS: dict[str, Callable[[Callable[..., Any]], str]] = {
    FIRST: step_on_a_cpu,
    "bytes per parameter, gradient included": count_bytes,
    "4,000 updates far below bf16's resolution": keep_small_updates,
    "gradients of 1e-7, of 1e5": scale_freely,
    "resumes bit for bit": resume_exactly,
    "`copy.deepcopy`, `pickle`": copy_and_pickle,
    "states go on in `torch.optim.AdamW`": give_states_to_torch,
    "`torch.compile(opt.step, fullgraph=True)`": compile_in_a_graph,
    "transposed weights": step_transposed,
    "FSDP2, uneven shards, and its checkpoint": shard,
}


def attempt(name: str, trial: str) -> None:
    try:
        print(f"RESULT {TRIALS[trial](MAKERS[name][1])}")
    except Exception as error:
        reason = " ".join(str(error).split())[-300:] or "no message"
        print(f"RESULT no\nREASON {type(error).__name__}: {reason}")


def asked(name: str, trial: str) -> tuple[str, str]:
    """The answer of one process, and its reason."""
    command = [sys.executable, "-m", "bench.features", "--trial", trial, "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "not verified", f"took longer than {WAIT_S} s"
    lines = done.stdout.splitlines()
    result = next((line[7:] for line in lines if line.startswith("RESULT ")), "no")
    reason = next((line[7:] for line in lines if line.startswith("REASON ")), "")
    return result, reason or ("" if result != "no" else done.stderr.strip()[-300:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.features", description="What each package can do.")
    parser.add_argument("--only", choices=MAKERS, help="one package")
    parser.add_argument("--trial", choices=TRIALS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        attempt(options.only, options.trial)
        return
    chosen, reasons, rows = {}, [], []
    for name, (package, _) in MAKERS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            if options.only in (None, name):
                chosen[name] = metadata.version(package)
    print(describe_machine())
    steps = {name: asked(name, FIRST) for name in chosen}
    for trial in TRIALS:
        answers = []
        for name, first in steps.items():
            unseen = trial != FIRST and first[0] == "no"
            answer, reason = first if trial == FIRST else ("not verified", "") if unseen else asked(name, trial)
            answers.append(answer)
            reasons += [f"{name}, {trial}: {reason}"] if reason else []
            print(f"{name}, {trial}: {answer}", file=sys.stderr)
        rows.append((trial, *answers))
    for row in [("", *(f"{name} {version}" for name, version in chosen.items())), ("---",) * (len(chosen) + 1), *rows]:
        print(f"| {' | '.join(row)} |")
    print("\n".join(["", *reasons]))


if __name__ == "__main__":
    main()
