"""Checkpoint files: written completely or not at all, and loaded only if every checksum holds.

A file is a dict with "model", "optimizer", "extra" and "checksums", written by `torch.save`. torch.load reads it with
weights_only=True. It is written under another name in the same folder and renamed once it is on the disk.
"""

import ctypes
import importlib
import os
import socket
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashopt_compile.checkpoint import foreign
from flashopt_compile.checkpoint.states import library_version, unmarked
from flashopt_compile.checkpoint.values import described, is_tensor
from flashopt_compile.checkpoint.weights import entries, parameter_keys, unwrapped, unwrapped_optimizer
from flashopt_compile.distributed.shards import (
    as_sharded,
    first_process_succeeds,
    is_first_process,
    is_sharded,
    local,
    part_of,
    whole,
)

FILE_FORMAT = 1
FORMAT_KEY = "flashopt_file"
STRUCTURE = "everything but the tensors"
SUFFIX = ".partial"
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
Content = dict[str, Any]


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> None:
    """Write model, optimizer and `extra` to a file. At any moment `path` is the complete old file or the new one.

    `extra` may hold numbers, strings, tensors, and lists, tuples and dicts of these, such as
    `scheduler=scheduler.state_dict()`. If the model is sharded, all processes must call: the first one collects
    everything and writes the file that a single process would have written, and the others wait for it.
    """
    optimizer = unwrapped_optimizer(optimizer)
    held = {key: value for key, (_, value) in entries(model).items()}
    check_optimizer(held, optimizer)
    metadata = getattr(unwrapped(model).state_dict(), "_metadata", {})
    content = {
        "torch": str(torch.__version__),
        "library": library_version(),
        "model": {key: value.detach() if isinstance(value, Tensor) else value for key, value in held.items()},
        "metadata": {str(key): dict(value) for key, value in metadata.items()},
        "parameters": parameter_keys(model, optimizer),
        "optimizer": unmarked(optimizer.state_dict()),  # `parameters` says which is which
        "extra": extra,
    }
    if not any(map(is_sharded, held.values())):
        write(path, content)
        return
    writes = is_first_process()

    def collected(tensor: Tensor) -> Tensor | None:
        everything = whole(tensor)
        return everything.cpu() if writes else None

    content = mapped(content, collected)
    with first_process_succeeds():
        if writes:
            write(path, content)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load what `save` wrote into model and optimizer, and return `extra`, with its tensors on the CPU.

    If the file is damaged or does not fit, raise ValueError and leave model and optimizer as they were. If the model is
    sharded, each process takes its part, however the model was sharded when saved.
    """
    optimizer = unwrapped_optimizer(optimizer)
    check_optimizer({key: value for key, (_, value) in entries(model).items()}, optimizer)
    content = read(path)
    if FORMAT_KEY not in content:
        raise ValueError(f"{path} was not written by flashopt_compile.save; its keys are {described(list(content))}.")
    own = entries(model)
    names = {key: actual for key, (actual, _) in own.items()}
    check_model(str(path), model, content["model"])
    saved = OrderedDict((names[key], fitted(value, own[key][1])) for key, value in content["model"].items())
    saved._metadata = content["metadata"]  # pyright: ignore[reportAttributeAccessIssue]
    before = {key: local(each).detach().cpu().clone() for key, (_, each) in own.items() if isinstance(each, Tensor)}
    held = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        optimizer.load_state_dict(mapped(content["optimizer"], Tensor.clone))  # torch.optim keeps what it is given
        unwrapped(model).load_state_dict(saved)
    except Exception:
        optimizer.__setstate__(held)
        restored = {names[key]: as_sharded(value, own[key][1]) for key, value in before.items()}
        unwrapped(model).load_state_dict(restored, strict=False)
        raise
    return mapped(content["extra"], Tensor.clone)  # copies, as the tensors lie in the mapped file


def write(path: str | os.PathLike[str], content: Content) -> None:
    """Write a dict with its checksums, atomically."""
    list(leaves("", content))  # raises ValueError before anything is written
    copies: dict[Any, Tensor] = {}
    content = {FORMAT_KEY: FILE_FORMAT, **mapped(content, lambda tensor: _compact(tensor, copies))}
    content["checksums"] = checksums(content)
    with replacing(path) as partial:
        torch.save(content, partial)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path and rename it to `path` once it is on the disk. On an error nothing changes."""
    path = Path(path)
    remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{SUFFIX}")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync(path.parent)  # flush the rename itself


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove the partial files of processes on this machine that were killed while saving to `path`."""
    for leftover in path.parent.glob(f".{path.name}.{socket.gethostname()}.*{SUFFIX}"):
        process = leftover.name.removesuffix(SUFFIX).rpartition(".")[2]
        if process.isdigit() and not _is_alive(int(process)):
            leftover.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def read(path: str | os.PathLike[str]) -> Content:
    """Read a file, and verify every tensor if we wrote it. Tensors are mapped from the file until they are copied."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist or is not a file.")
    try:
        content = _read(path)
    except ImportError:
        raise
    except Exception as error:  # damaged bytes can make the unpickler raise anything
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(f"{path} cannot be read; it is truncated, altered or no checkpoint: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {described(content)}; expected is a dict.")
    if FORMAT_KEY in content or "checksums" in content:
        verify(str(path), content)
    return content


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if not foreign.needs_torchao(error):
            raise
    try:
        importlib.import_module("torchao.optim")  # tells torch.load that its tensors are safe
    except ImportError:
        raise ImportError(f"{path} holds tensors of torchao; pip install torchao to read it.") from None
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def verify(path: str, content: Content) -> None:
    """Raise ValueError unless every checksum holds."""
    if content.get(FORMAT_KEY) != FILE_FORMAT:
        raise ValueError(
            f"{path} has file format {described(content.get(FORMAT_KEY))}, written by version "
            f"{described(content.get('library'))}; this version reads {FILE_FORMAT}."
        )
    recorded = content.get("checksums")
    if not isinstance(recorded, dict):
        raise ValueError(f"{path} is damaged: it has no checksums.")
    try:
        found = checksums({key: value for key, value in content.items() if key != "checksums"})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for name in {**found, **recorded}:
        if found.get(name) != recorded.get(name):
            raise ValueError(f"{path} is damaged: {name} is not what was written.")


def checksums(content: Content) -> dict[str, int]:
    """CRC-32 of each tensor with its dtype and shape, by its path in the dict, and of the repr of everything else."""
    sums: dict[str, int] = {}
    for name, leaf in leaves("", content):
        if isinstance(leaf, Tensor):
            sums[name] = zlib.crc32(_bytes(leaf), zlib.crc32(f"{leaf.dtype} {tuple(leaf.shape)}".encode()))
    return {**sums, STRUCTURE: zlib.crc32(repr(mapped(content, lambda _: "tensor")).encode())}


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Walk nested dicts, lists and tuples: (path, value). Raise ValueError for what a checkpoint cannot hold."""
    if isinstance(value, dict | list | tuple) and not isinstance(value, torch.Size):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{path}.{key}" if path else str(key), each)
    elif type(value) in PLAIN or (type(value) in (Tensor, nn.Parameter) and is_tensor(value)):
        yield path, value
    else:
        raise ValueError(
            f"{path} is a {type(value).__name__}; a checkpoint holds numbers, strings, dense tensors, and lists, "
            "tuples and dicts of these."
        )


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Copy nested containers as plain ones, with `function` applied to each tensor."""
    if isinstance(value, dict):
        return {key: mapped(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = (mapped(each, function) for each in value)
        return list(items) if isinstance(value, list) else tuple(items)
    return function(value) if isinstance(value, Tensor) else value


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor's elements, in order, without numpy."""
    data = tensor.detach().cpu().contiguous()
    if not data.numel():
        return b""
    buffer = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
    buffer.tensor = data  # pyright: ignore[reportAttributeAccessIssue]
    return buffer


def _compact(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    """The tensor without unused storage. Tied tensors stay one."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    key = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return copies.setdefault(key, tensor.clone())


def fitted(value: Any, held: Any) -> Any:
    """Shard a saved value if the model's own tensor is sharded."""
    return as_sharded(part_of(value, held), held) if is_sharded(held) else value


def check_optimizer(held: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if the model is sharded and the optimizer does not know about shards."""
    if any(map(is_sharded, held.values())) and not hasattr(optimizer, "get_fp32_model_state_dict"):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; for a sharded model allowed are those of flashopt_compile."
        )


def check_model(path: str, model: nn.Module, saved: Any) -> None:
    """Raise ValueError unless the file's model has the keys, shapes and dtypes of this one."""
    own = entries(model)
    missing, unexpected = [key for key in own if key not in saved], [key for key in saved if key not in own]
    if missing or unexpected:
        raise ValueError(
            f"{path} is of another model: it lacks {described(missing)} and has {described(unexpected)} besides."
        )
    for key, (_, held) in own.items():
        value = saved[key]
        if isinstance(held, Tensor) and not (is_tensor(value, tuple(held.shape)) and value.dtype == held.dtype):
            raise ValueError(f"{path} is of another model: {key} is {described(value)}; here it is {described(held)}.")
