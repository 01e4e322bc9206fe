"""Private names of PyTorch, broken one by one: training goes on with the right bits, and one warning says why."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from training import assert_identical, parameters, stored, train

from flashopt_compile import FlashSGD
from flashopt_compile.engine.kernel import ComputedKernel
from flashopt_compile.inductor import bind, gcc, probes, versions
from flashopt_compile.inductor import compile as inductor
from flashopt_compile.inductor.compile import BoundKernel
from flashopt_compile.inductor.probes import FastPath, Private

PATHS = [path for path in vars(probes).values() if isinstance(path, FastPath)]
NAMES = [(path, private) for path in PATHS for private in path.needs]
FUNCTIONS = [(path, private) for path, private in NAMES if private.parameters is not None]
in_tiles = pytest.mark.skipif(not gcc.loops_for_gcc(), reason="only what gcc vectorizes is in tiles")
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget this process's compiled kernels and past warnings."""
    monkeypatch.setattr(inductor, "_kernels", type(inductor._kernels)())
    monkeypatch.setattr(probes, "_told", set())


def owner_of(private: Private) -> tuple[Any, str]:
    """The object that has the name, and the last part of the name."""
    module, _, attributes = private.path.partition(":")
    owner, _, name = attributes.rpartition(".")
    if module == "torch._inductor.config":  # one object, with dots in its names
        return importlib.import_module(module), attributes
    return Private(f"{module}:{owner}").find() if owner else importlib.import_module(module), name


def remove(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the private name be missing."""
    owner, name = owner_of(private)
    if isinstance(owner, ModuleType):
        monkeypatch.delattr(owner, name)
        return
    for each in (owner, *(owner if isinstance(owner, type) else type(owner)).__mro__):
        if name in vars(each):
            monkeypatch.delattr(each, name)


def listen(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and our warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(each.message) for each in caught if "flashopt_compile" in str(each.message)]


@pytest.mark.parametrize("path, private", NAMES, ids=lambda each: getattr(each, "path", None))
def test_a_missing_name_closes_its_path_with_one_warning(
    path: FastPath, private: Private, monkeypatch: pytest.MonkeyPatch
):
    assert path.is_open()
    remove(private, monkeypatch)
    is_open, (told,) = listen(path.is_open)
    assert not is_open
    module, _, attributes = private.path.partition(":")
    assert f"torch {torch.__version__} " in told and f"{module} has no {attributes}" in told and path.cost in told
    assert listen(path.is_open) == (False, [])


def takes_other_arguments(other: Any) -> None: ...


@pytest.mark.parametrize("path, private", FUNCTIONS, ids=lambda each: getattr(each, "path", None))
def test_another_signature_closes_the_path(path: FastPath, private: Private, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*owner_of(private), takes_other_arguments)
    is_open, (told,) = listen(path.is_open)
    assert not is_open and "takes (other) instead of" in told


def test_more_arguments_are_no_other_signature_if_they_may_be_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch._inductor.utils.sympy_index_symbol", lambda name, real=True: name)
    assert probes.TILES.is_open()
    monkeypatch.setattr("torch._inductor.utils.sympy_index_symbol", lambda name, real: name)
    assert "takes (name, real)" in str(probes.TILES.fault())


def test_a_missing_option_is_left_out_and_told_of_once(monkeypatch: pytest.MonkeyPatch):
    remove(Private("torch._inductor.config:realize_reads_threshold"), monkeypatch)
    known, (told,) = listen(lambda: probes.known(inductor.CPU_OPTIONS))
    assert known == {name: value for name, value in inductor.CPU_OPTIONS.items() if name != "realize_reads_threshold"}
    assert "without the option realize_reads_threshold" in told and "slower" in told
    assert listen(lambda: probes.known(inductor.CPU_OPTIONS)) == (known, [])


def test_without_a_stance_to_look_at_torch_is_taken_to_compile(monkeypatch: pytest.MonkeyPatch):
    remove(probes.STANCE.needs[0], monkeypatch)
    permission, (told,) = listen(probes.permission)
    assert permission == (False, None) and "stance" in told


def trained(eager: bool) -> list[Tensor]:
    return stored(train(FlashSGD(parameters([(64, 64)]), lr=0.05, eager=eager), range(2)))


def remove_names(*paths: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for path in paths:
            remove(Private(path), monkeypatch)

    return patch


def raise_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(self: Any) -> None:
        raise KeyError("what another Inductor has not")

    monkeypatch.setattr("flashopt_compile.inductor.tiles.TiledScheduling.flush", flush)
    monkeypatch.setattr("flashopt_compile.inductor.tiles._version", lambda: "in no cache")


def spoil_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loops in tiles be written wrong, so that the compiled step and its bound function agree on other bits."""
    real = inductor._bound_kernel

    def bound(*given: Any) -> BoundKernel:
        kernel = real(*given)
        if not given[-1]:
            return kernel
        head = [argument == 0 for argument in kernel.found.arguments].index(True)

        def spoil(*arguments: Any) -> None:
            kernel.found.function(*arguments)
            arguments[head][0, 0, :1].fill_(77)

        return replace(kernel, found=replace(kernel.found, function=spoil))

    monkeypatch.setattr(inductor, "_bound_kernel", bound)


def rename_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bind, "PREFIX", "fused_in_another_way")


def change_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what Inductor returns lack the attributes that it had."""
    real = bind.Noting.__call__

    def compiled(self: bind.Noting, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        self.graphs[:] = [SimpleNamespace() for _ in self.graphs]
        return result

    monkeypatch.setattr(bind.Noting, "__call__", compiled)


# One that Inductor has imported under a name of its own, or it would not compile anything either.
MOVED = "torch._inductor.custom_graph_pass:CustomSchedulerPass"
TILES: dict[str, tuple[Patch, str]] = {
    "a moved class": (remove_names(MOVED), "has no CustomSchedulerPass"),
    "an error": (raise_in_tiles, "KeyError: 'what another Inductor has not'"),
    "a wrong result": (spoil_tiles, "they give other bits than the plain compiled step"),
}
BINDING: dict[str, tuple[Patch, str]] = {
    "a renamed prefix": (rename_functions, "it consists of 0 C++ functions"),
    "a moved function": (remove_names("torch._inductor.compile_fx:compile_fx_inner"), "has no compile_fx_inner"),
    "other attributes": (change_graphs, "has no attribute 'current_callable'"),
}


@in_tiles
@pytest.mark.parametrize("way", TILES)
def test_without_tiles_training_goes_on_with_the_right_bits(way: str, monkeypatch: pytest.MonkeyPatch):
    patch, why = TILES[way]
    patch(monkeypatch)
    found, (told,) = listen(lambda: trained(eager=False))
    assert torch.__version__ in told and "without loops in tiles" in told and why in told and "twice as long" in told
    assert {type(kernel) for kernel in inductor._kernels.values()} <= {BoundKernel, ComputedKernel}
    assert_identical(found, trained(eager=True))


@pytest.mark.parametrize("way", BINDING)
def test_without_binding_training_goes_on_with_the_right_bits(way: str, monkeypatch: pytest.MonkeyPatch):
    patch, why = BINDING[way]
    patch(monkeypatch)
    found, (told,) = listen(lambda: trained(eager=False))
    assert torch.__version__ in told and "called through Dynamo" in told and why in told
    assert {type(kernel) for kernel in inductor._kernels.values()} == {ComputedKernel}
    assert_identical(found, trained(eager=True))


def test_without_guards_and_marks_training_goes_on_with_the_right_bits(monkeypatch: pytest.MonkeyPatch):
    """Sizes are baked into the graphs then, which must not be bound."""
    for path in (probes.GUARDS, probes.MARKS):
        remove(path.needs[0], monkeypatch)
    found, told = listen(lambda: trained(eager=False))
    for path in (probes.GUARDS, probes.MARKS):
        assert len([each for each in told if f"without {path.name}" in each]) == 1
    assert_identical(found, trained(eager=True))


def test_without_a_profiler_to_look_at_steps_run_in_torchs_wrapper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("torch.autograd.profiler._is_profiler_enabled")
    called: list[Any] = []
    optimizer = FlashSGD(parameters([(4,)]), eager=True)
    optimizer.register_step_post_hook(lambda *given: called.append(given))
    _, (told,) = listen(lambda: train(optimizer, range(2)))
    assert "_is_profiler_enabled" in told and "longer" in told and len(called) == 2


WITHOUT_A_PROFILER = """
import torch, warnings
del torch.autograd.profiler._is_profiler_enabled
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from flashopt_compile import FlashSGD
assert len(caught) == 1 and "_is_profiler_enabled" in str(caught[0].message), [str(each.message) for each in caught]
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
called, optimizer = [], FlashSGD([weight], lr=0.5, eager=True)
optimizer.register_step_post_hook(lambda *given: called.append(given))
optimizer.step()
assert len(called) == 1 and weight.tolist() == [0.5] * 4
"""


def test_torch_wraps_steps_itself_if_there_are_no_hooks_to_look_at():
    subprocess.run([sys.executable, "-c", WITHOUT_A_PROFILER], check=True, timeout=300)


def test_a_torch_that_is_too_old_is_refused_in_one_sentence():
    for version in ("1.13.1", "2.9.1", "2.12.1+cu130"):
        with pytest.raises(ImportError) as caught:
            versions.check(version)
        assert str(caught.value) == f"flashopt-compile needs torch 2.13 to 2.15, but torch {version} is installed."


def test_a_newer_torch_is_warned_of_and_works():
    for version in ("2.16.0", "2.16.0a0+gitabc", "3.0.0.dev20270101"):
        with pytest.warns(RuntimeWarning, match=f"torch {version.replace('+', '[+]')} is newer than those") as caught:
            versions.check(version)
        assert len(caught) == 1


def test_tested_versions_and_unreadable_ones_pass_in_silence():
    for version in ("2.13.0+cpu", "2.14.1", "2.15.1", "git"):
        assert listen(lambda version=version: versions.check(version)) == (None, [])


def test_the_version_is_looked_at_before_anything_else_is_imported():
    program = "import torch; torch.__version__ = '2.9.1'; del torch.compiler.keep_tensor_guards_unsafe; import quant"
    done = subprocess.run([sys.executable, "-c", f"{program}, flashopt_compile"], capture_output=True, text=True)
    assert done.returncode and done.stderr.endswith("but torch 2.9.1 is installed.\n")
