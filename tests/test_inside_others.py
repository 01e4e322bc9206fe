"""Optimizers, tools and containers of others that hold one of ours: SAM, averaging, wrappers, flat state dicts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.nn import Parameter
from training import assert_identical, give_gradients, parameters, stored, train

from flashopt_compile import FlashAdam, FlashAdamW, FlashLion, FlashOptimizer, FlashSGD, FlashSGDW, load, save

EVERY = [FlashAdam, FlashAdamW, FlashLion, FlashSGD, FlashSGDW]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al., 2021): a step by the gradient at w + rho g / |g|."""

    def __init__(self, params: Any, base: Callable[..., torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups  # so that schedulers of either see the same

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure = torch.enable_grad()(closure)
        loss = closure()
        held = [(p, p.detach().clone(), group["rho"]) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p, _, _ in held if p.grad is not None]).norm()
        for p, _, rho in held:
            p += rho * p.grad / norm
        closure()
        for p, before, _ in held:
            p.copy_(before)
        self.base.step()
        return loss


def problem() -> tuple[list[Parameter], Callable[[], Tensor]]:
    params = parameters([(64, 64), (64,)])
    random = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=random).to(torch.bfloat16)

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = (nn.functional.linear(x, *params).float() - x.roll(1, dims=1).float()).square().mean()
        loss.backward()
        return loss

    return params, closure


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_sam_around_ours_trains_and_moves_nothing_but_by_its_steps(kind: type[FlashOptimizer]):
    options = {"lr": 0.1 if kind in (FlashSGD, FlashSGDW) else 3e-3}
    params, closure = problem()
    sam = SAM(params, kind, rho=0.05, eager=True, **options)
    losses = [sam.step(closure).item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    assert sam.base.param_groups[0]["rho"] == 0.05

    (one, of_sam), (two, plain) = problem(), problem()
    sam, optimizer = SAM(one, kind, rho=0.0, eager=True, **options), kind(two, eager=True, **options)
    for _ in range(3):
        sam.step(of_sam)
        plain()
        optimizer.step()
    assert_identical(stored(sam.base), stored(optimizer))  # pyright: ignore[reportArgumentType]


def test_zero_redundancy_optimizer_has_the_bits_of_one_process_and_resumes(tmp_path: Path):
    run(tmp_path, 2, "zero_redundancy")


class Wrapper:
    """What Accelerate and Lightning give their users in place of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_save_and_load_take_the_optimizer_from_its_wrapper(tmp_path: Path):
    model, other = nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(64, 64).to(torch.bfloat16)
    optimizer, again = (FlashAdamW(each.parameters(), eager=True) for each in (model, other))
    train(optimizer, range(2))
    save(tmp_path / "run.ckpt", model, Wrapper(Wrapper(optimizer)), step=2)  # pyright: ignore[reportArgumentType]
    assert load(tmp_path / "run.ckpt", other, Wrapper(again)) == {"step": 2}  # pyright: ignore[reportArgumentType]
    assert_identical(stored(again), stored(optimizer))


@pytest.mark.parametrize("how", [{"fused": True, "foreach": False}, {"fused": False, "foreach": True}])
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_a_first_step_at_lr_0_makes_states_and_changes_nothing(kind: type[FlashOptimizer], how: dict[str, bool]):
    """torchtitan and torch.distributed.checkpoint take one to have states. Groups are built as torchtitan builds them:
    dicts with lists `params` and `param_names`, and both of `fused` and `foreach`."""
    params = parameters()
    names = ["even", "ragged", "bias"]
    kept = {"momentum": 0.9} if kind in (FlashSGD, FlashSGDW) else {}
    decay = 0.0 if kind.decays_by_penalty else 0.1  # a penalty is a gradient, to torch.optim's states as to ours
    group = {"params": params, "param_names": names, **how, "lr": 0.1, "weight_decay": decay, **kept}
    optimizer = kind([group], eager=True)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step(closure=None)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad(set_to_none=True)
    assert_identical([p.detach() for p in params], before)
    for p in params:
        assert optimizer.state[p]["step"] == 1  # as torch.optim's count
        assert not any(value.any() for key, value in optimizer.state[p].items() if key != "step")
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == names
    assert saved["param_groups"][0].items() >= how.items()


def test_states_are_found_by_the_names_of_parameters_and_the_live_keys():
    """torchtitan looks up every key of the live groups and states in a flat dict."""
    one, two = (FlashAdamW([{"params": parameters(), "param_names": ["a", "b", "c"]}], eager=True) for _ in range(2))
    train(one, range(3))
    train(two, range(1))
    saved = one.state_dict()
    (group,) = saved["param_groups"]
    flat: dict[str, Any] = {}
    for number, name in zip(group["params"], group["param_names"], strict=True):
        flat |= {f"state.{name}.{key}": value for key, value in saved["state"][number].items()}
        flat |= {f"group.{name}.{key}": value for key, value in group.items()}
    (live,) = two.param_groups
    states = [
        {key: flat[f"state.{name}.{key}"] for key in two.state[parameter]}
        for name, parameter in zip(live["param_names"], live["params"], strict=True)
    ]
    options = {key: flat[f"group.a.{key}"] for key in live if key not in ("params", "param_names")}
    groups = [{"params": list(range(len(states))), **options}]
    two.load_state_dict({"state": dict(enumerate(states)), "param_groups": groups})
    for parameter, other in zip(live["params"], one.param_groups[0]["params"], strict=True):
        assert_identical(list(two.state[parameter].values()), list(one.state[other].values()))


def test_parameters_swapped_for_another_kind_are_refused_or_followed():
    (p,) = params = parameters([(64, 64)])
    optimizer = train(FlashAdamW(params, eager=True), range(1))
    before = stored(optimizer)
    torch.utils.swap_tensors(p, Parameter(torch.zeros(64, 64)))  # as `model.float()` may
    give_gradients(params, 1)
    with pytest.raises(TypeError, match=r"was torch.bfloat16 when its state was made and is torch.float32 now"):
        optimizer.step()
    assert_identical(stored(optimizer)[1:], before[1:])
