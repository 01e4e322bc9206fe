"""Probes: a fast path is taken only if every private name of PyTorch that it uses looks as it did when it was written.

A new release may move or change any of these names. The fast path that needs one is then closed: the plain path gives
the same bits, and one warning names the torch version, what is missing, and how much slower steps are. What a probe
cannot see shows when the path is tried: an exception or other bits close it as well (`compile.py`). No version is
compared with another.
"""

import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

_told: set[str] = set()


@dataclass(frozen=True)
class Private:
    """A private name, `module:attribute`; if it is a function, also the parameters that it is called with."""

    path: str
    parameters: str | None = None

    def find(self) -> Any:
        """The object of that name. Raises ImportError or AttributeError if there is none."""
        module, _, attributes = self.path.partition(":")
        found = importlib.import_module(module)
        for name in attributes.split("."):
            found = getattr(found, name)
        return found

    def fault(self) -> str | None:
        """What is wrong with it in this torch, as half a sentence; None if nothing is."""
        module, _, attributes = self.path.partition(":")
        try:
            found = self.find()
        except (ImportError, AttributeError):
            return f"{module} has no {attributes}"
        if self.parameters is None:
            return None
        ours = self.parameters.split()
        try:
            known = inspect.signature(found).parameters
        except (TypeError, ValueError):
            return f"{module}.{attributes} is no function"
        kinds = {each.kind for each in known.values()}
        required = {
            name
            for name, each in known.items()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        if required <= set(ours) and (set(ours) <= set(known) or inspect.Parameter.VAR_KEYWORD in kinds):
            return None
        return f"{module}.{attributes} takes ({', '.join(known)}) instead of ({', '.join(ours)})"


@dataclass(frozen=True)
class FastPath:
    """What some private names make faster, and what it costs to do without."""

    name: str
    cost: str
    needs: tuple[Private, ...]

    def fault(self) -> str | None:
        """What is wrong with the first name that is not as it should be; None if all are."""
        return next((fault for each in self.needs if (fault := each.fault())), None)

    def is_open(self) -> bool:
        """Whether all names that it needs are there; if not, warn once."""
        fault = self.fault()
        if fault is not None:
            self.close(fault)
        return fault is None

    def close(self, why: str) -> None:
        """Warn, once in a process, that the path is not taken. `why` is half a sentence."""
        tell(self.name, f"torch {torch.__version__} is used without {self.name}, as {why}; {self.cost}")


def tell(topic: str, text: str) -> None:
    """Warn of a topic, once in a process."""
    if topic not in _told:
        _told.add(topic)
        warnings.warn(f"flashopt_compile: {text}.", RuntimeWarning, stacklevel=2)


def reason_of(error: BaseException) -> str:
    """The type and first line of what caused an error."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}"


_CPP = "torch._inductor.codegen.cpp"
_CPP_UTILS = "torch._inductor.codegen.cpp_utils"
_CONFIG = "torch._inductor.config"

COMPILER = FastPath(
    "knowing its C++ compiler",
    "a step on a CPU may take twice as long",
    (
        Private("torch._inductor.cpp_builder:is_gcc", ""),
        Private("torch._inductor.cpu_vec_isa:pick_vec_isa", ""),
        Private("torch._inductor.cpu_vec_isa:VecISA.bit_width", "self"),
    ),
)
TILES = FastPath(
    "loops in tiles",
    "a step on a CPU takes about twice as long",
    (
        Private("torch._inductor.custom_graph_pass:CustomSchedulerPass", ""),
        *(Private(f"{_CONFIG}:{name}") for name in ("_pre_fusion_custom_pass", "inplace_buffers")),
        *(Private(f"{_CONFIG}:{name}") for name in ("cpp.simdlen", "cpp.march")),
        Private(f"{_CPP}:CppScheduling", "scheduler"),
        Private(f"{_CPP}:CppScheduling.kernel_proxy_cls", "kernel_group"),
        Private(f"{_CPP}:CppScheduling.can_fuse_vertical", "self node1 node2"),
        Private(f"{_CPP}:CppScheduling.can_fuse_horizontal", "self node1 node2"),
        Private(f"{_CPP}:CppScheduling.can_fuse_vertical_outer_loop", "self node1 node2"),
        Private(f"{_CPP}:CppScheduling.codegen_node", "self node"),
        Private(f"{_CPP}:CppScheduling.flush", "self"),
        Private(f"{_CPP}:CppKernelProxy", "kernel_group"),
        Private(f"{_CPP}:CppKernelProxy.codegen_nodes", "self nodes"),
        Private(f"{_CPP}:CppKernelProxy.codegen_loops", "self code worksharing"),
        Private(f"{_CPP}:CppKernelProxy.set_ranges", "self lengths reduction_lengths"),
        Private(f"{_CPP}:OuterLoopFusedKernel", "kernel_group"),
        Private(f"{_CPP}:OuterLoopFusedKernel.decide_parallel_depth", "self max_parallel_depth threads"),
        Private(f"{_CPP}:ParallelDepth", "parallel_depth start_depth"),
        Private(f"{_CPP}:KernelGroup.finalize_kernel", "self new_kernel nodes"),
        Private(f"{_CPP}:LoopLevel", "var size offset steps"),
        Private(f"{_CPP}:LoopNest", "loops kernel"),
        Private(f"{_CPP_UTILS}:LocalBufferContext", "kernel_args"),
        Private(f"{_CPP_UTILS}:LocalBufferContext.add_local_buffer", "self local_buffer global_buffers"),
        Private(f"{_CPP_UTILS}:LocalBufferContext.localize_function", "self fn rewrite_index"),
        Private("torch._inductor.dependencies:MemoryDep", "name index var_names size"),
        Private("torch._inductor.ir:FixedLayout", "device dtype size stride"),
        Private("torch._inductor.ir:Buffer", "name layout"),
        Private("torch._inductor.ir:NonOwningLayout", "view"),
        Private("torch._inductor.scheduler:SchedulerNode.recompute_size_and_body", "self extra_indexing_constraints"),
        Private("torch._inductor.utils:sympy_index_symbol", "name"),
        Private("torch._inductor.virtualized:V"),
        Private("torch.utils._sympy.functions:Identity"),
    ),
)
BINDING = FastPath(
    "direct calls of its C++ functions",
    "compiled steps are called through Dynamo, which takes up to 0.2 ms more for each call",
    (
        Private("torch._inductor.compile_fx:compile_fx", "model_ example_inputs_ inner_compile config_patches"),
        Private("torch._inductor.compile_fx:compile_fx_inner", "gm example_inputs"),
        Private("torch._functorch.config:enable_autograd_cache"),
    ),
)
TRANSPOSITION = FastPath(
    "its vectorized transposition",
    "weights that are transposed or channels_last are copied by torch, up to five times slower",
    BINDING.needs,
)
INTERLEAVING = FastPath(
    "its interleaved copies",
    "steps of channels_last filters of 3×3 take about twice as long",
    (*TILES.needs, *BINDING.needs),
)
FRAMES = FastPath(
    "the frames that Dynamo traces",
    "a caller's torch.compile(opt.step) checks each parameter and gradient, some 2 µs more for each",
    (Private("torch._dynamo.symbolic_convert:InstructionTranslator.current_tx", ""),),
)
GUARDS = FastPath(
    "guards on tensors alone",
    "a call through Dynamo takes up to 40 µs longer",
    (Private("torch.compiler:keep_tensor_guards_unsafe", "guard_entries"),),
)
MARKS = FastPath(
    "marks of sizes that change",
    "the first steps compile again for each new shape",
    (Private("torch._dynamo:maybe_mark_dynamic", "t index"),),
)
STATIC = FastPath(
    "marks of addresses that stay",
    "a caller's torch.compile leaves capturable steps out of CUDA graphs",
    (Private("torch._dynamo:mark_static_address", "t guard"),),
)
STANCE = FastPath(
    "its compiler stance",
    "a stance that is set between steps may go unnoticed",
    (Private("torch._dynamo.eval_frame:_stance.stance"), Private("torch._dynamo.config:disable")),
)
GATHERING = FastPath(
    "word of when a backward pass ends",
    "gradient release steps each small parameter by itself, which takes up to 0.1 ms more for each",
    (
        Private("torch._C:_current_graph_task_id"),
        Private("torch.autograd:Variable._execution_engine"),
    ),
)
WRAPPER = FastPath(
    "steps outside of torch.optim's wrapper",
    "each step takes up to 60 µs longer",
    (
        Private("torch.optim:Optimizer.profile_hook_step", "func"),
        Private("torch.optim.optimizer:_global_optimizer_pre_hooks"),
        Private("torch.optim.optimizer:_global_optimizer_post_hooks"),
        Private("torch.autograd.profiler:_is_profiler_enabled"),
    ),
)


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Inductor's options that this Inductor has; warn once of each that it lacks."""
    lacking = {name: fault for name in options if (fault := Private(f"{_CONFIG}:{name}").fault())}
    for name, fault in lacking.items():
        tell(name, f"torch {torch.__version__} is used without the option {name}, as {fault}; steps may be slower")
    return {name: value for name, value in options.items() if name not in lacking}


def guards() -> dict[str, Any]:
    """Options by which Dynamo checks tensors alone: neither a frozen `Step` nor what it consists of."""
    return {"guard_filter_fn": GUARDS.needs[0].find()} if GUARDS.is_open() else {}


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Tell Dynamo that the size of a dim changes."""
    if MARKS.is_open():
        MARKS.needs[0].find()(tensor, dim)


def mark_static(tensor: Tensor) -> None:
    """Tell Dynamo that a tensor stays where it is, so that a CUDA graph may write to it."""
    if STATIC.is_open():
        STATIC.needs[0].find()(tensor, guard=True)


def permission() -> tuple[bool, Any]:
    """Whether compiling is switched off, and torch's stance on it."""
    dynamo = importlib.import_module("torch._dynamo")
    try:
        return bool(dynamo.config.disable), dynamo.eval_frame._stance.stance
    except AttributeError as error:
        STANCE.close(str(error))
        return False, None


def is_watched(optimizer: Any) -> bool:
    """Whether a hook or a profiler is to know of a step."""
    try:
        return bool(
            profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_pre_hooks
            or _global_post_hooks
        )
    except AttributeError as error:
        WRAPPER.close(str(error))
        return True


_global_pre_hooks, _global_post_hooks = (
    getattr(importlib.import_module("torch.optim.optimizer"), f"_global_optimizer_{when}_hooks", None)
    for when in ("pre", "post")
)
