"""Make Inductor believe in an absent GPU, so that it writes Triton code on any machine.

Everything here uses torch's private interfaces. It was checked with each torch in `TRITONS` and the triton that belongs
to it. Training code imports none of it.
"""

import contextlib
import ctypes
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashopt_compile.kernels.targets import Target

# The triton that belongs to each torch.
TRITONS = {"2.13": "3.8", "2.14": "3.8", "2.15": "3.9"}
# Positions in c10::DeviceType.
_DEVICE_TYPES = {"cuda": 1, "xpu": 12, "meta": 14}


class UncheckedVersion(ImportError):
    """The patches do not fit the installed torch and triton."""


def check_versions() -> dict[str, str]:
    """The installed versions, by package. Raise UncheckedVersion if triton is missing, or belongs to another torch."""
    found = {"torch": torch.__version__.partition("+")[0]}
    expected = TRITONS.get(_minor(found["torch"]))
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        install = "triton" if expected is None else f"'triton=={expected}.*'"
        raise UncheckedVersion(
            f"triton is not installed; with torch {found['torch']} it is added by pip install {install} numpy tqdm."
        ) from None
    if expected not in (None, _minor(found["triton"])):
        raise UncheckedVersion(
            f"triton is {found['triton']}; writing and compiling kernels without a GPU was checked with triton "
            f"{expected} for torch {found['torch']}."
        )
    return found


def _minor(version: str) -> str:
    """A version without what comes after its second number."""
    return ".".join(version.split(".")[:2])


@contextlib.contextmanager
def gpu(target: Target) -> Iterator[None]:
    """Within, `torch.compile` of fake tensors on `target.device` writes code for `target`."""
    found = check_versions()
    with contextlib.ExitStack() as stack:
        try:
            interface = importlib.import_module("torch._dynamo.device_interface")
            properties = importlib.import_module("torch._inductor.runtime.hints").DeviceProperties
            for patch in (_device_answers, _platform, _triton_is_there, _no_execution, _device_guard):
                stack.enter_context(patch(target))
        except (ImportError, AttributeError) as error:
            raise UncheckedVersion(
                f"torch {found['torch']} cannot be made to believe in a GPU, as it was changed: {error}."
            ) from error

        def forget() -> None:
            properties.create.cache_clear()
            interface.caching_worker_device_properties.pop(target.device, None)

        forget()
        stack.callback(forget)
        yield


@contextlib.contextmanager
def _device_answers(target: Target) -> Iterator[None]:
    """Answer the device queries of heuristics and code generation from the target's table.

    `torch.cuda.is_available()` stays false. Otherwise Dynamo and fake tensors would ask for the state of the device's
    random numbers, which needs a driver.
    """
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    interface = interfaces.XpuInterface if target.device == "xpu" else interfaces.CudaInterface
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: target.device_properties,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(getattr(torch, target.device), name, answer))
            stack.enter_context(mock.patch.object(interface, name, staticmethod(answer)))
        if target.device == "xpu":
            capability = staticmethod(lambda device=None: {"architecture": 1})
            stack.enter_context(mock.patch.object(interface, "get_compute_capability", capability))
        else:
            capability = target.properties["major"], target.properties["minor"]
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability))
        yield


@contextlib.contextmanager
def _platform(target: Target) -> Iterator[None]:
    """torch takes `cuda` for an AMD device if `torch.version.hip` says that it was built for HIP."""
    with mock.patch.object(torch.version, "hip", "6.4.0" if target.is_hip else None):
        yield


@contextlib.contextmanager
def _triton_is_there(target: Target) -> Iterator[None]:
    """Inductor asks for triton's live device, and names kernels by a hash that needs a driver."""
    scheduler = importlib.import_module("torch._inductor.scheduler")
    triton = importlib.import_module("torch.utils._triton")
    with (
        mock.patch.object(scheduler, "has_triton", lambda *_: True),
        mock.patch.object(triton, "triton_hash_with_backend", lambda: f"offline-{target.name}"),
    ):
        yield


@contextlib.contextmanager
def _no_execution(target: Target) -> Iterator[None]:
    """Constant folding would run `aten.full` and the like on the device. Caches would return code of another run."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(joint_graph_constant_folding=False, force_disable_caches=True, compile_threads=1):
        yield


@contextlib.contextmanager
def _device_guard(target: Target) -> Iterator[None]:
    """A CPU build has no C++ guard for GPUs, so `copy_` and slices of fake GPU tensors raise.

    Lend them the meta device's guard, which does nothing, through c10's registry. A build that has a guard is not
    changed.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    position = _DEVICE_TYPES[target.device]
    own = registry[position]
    if own is None:
        registry[position] = registry[_DEVICE_TYPES["meta"]]
    try:
        yield
    finally:
        registry[position] = own


@dataclass
class Outcome:
    """The results of a compilation: Inductor's modules, and Dynamo's notes on the graph's inputs."""

    modules: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)


class _Written(Exception):
    """Ends a compilation as soon as the code is written."""


@contextlib.contextmanager
def no_more_than_code() -> Iterator[Outcome]:
    """Stop Inductor once the code is written: importing, tuning and running it would need the device.

    The compilation ends with an exception. Inductor's warnings, about disabled caches and the files it leaves after an
    error, are silenced.
    """
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    outcome, compile_graph = Outcome(), compile_fx.compile_fx

    def note_inputs(graph: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not outcome.inputs:  # compile_fx calls itself once its options are set
            outcome.inputs += (node.meta["grapharg"] for node in graph.graph.find_nodes(op="placeholder"))
        return compile_graph(graph, inputs, *args, **kwargs)

    def stop(graph: Any) -> None:
        outcome.modules.append(graph.codegen()[0].value)
        raise _Written

    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            mock.patch.object(compile_fx, "compile_fx", note_inputs),
            mock.patch.object(lowering, "compile_to_module", stop),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield outcome
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def no_driver() -> Iterator[None]:
    """A kernel's module asks triton for the GPU's driver when it is loaded. Suppress that."""
    helpers = importlib.import_module("torch._inductor.runtime.triton_helpers")
    with mock.patch.object(helpers, "set_driver_to_gpu", lambda: None):
        yield


@contextlib.contextmanager
def no_device() -> Iterator[None]:
    """Inductor's `call` around kernels sets the current device. Suppress that."""
    with contextlib.ExitStack() as stack:
        for device in (torch.cuda, torch.xpu):
            stack.enter_context(mock.patch.object(device, "_DeviceGuard", lambda index: contextlib.nullcontext()))
            stack.enter_context(mock.patch.object(device, "set_device", lambda index: None))
        yield
