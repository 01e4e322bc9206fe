"""The recipes run as they are, and what docs/recipes.md says of each framework holds, where it is installed.

`make recipes` installs them all.
"""

# pyright: reportMissingImports=false

import runpy
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from training import assert_identical, stored

import flashopt_compile
from flashopt_compile import FlashAdamW, cli

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
# The package that a recipe needs, and the numbers of processes to run it in.
FRAMEWORKS = {
    "trainer": ("transformers", [1]),
    "sft": ("trl", [1]),
    "accelerate_ddp": ("accelerate", [1, 2]),
    "accelerate_fsdp2": ("accelerate", [2]),
    "lightning_module": ("lightning", [1]),
    "peft_lora": ("peft", [1]),
    "torchtitan_optimizers": ("torchtitan", [1]),
}
PLAIN = ["averaging", "schedulers"]  # need torch alone
# What a recipe leaves behind for `flashopt inspect` and `convert`.
FILES = {
    "trainer": "trainer-state/checkpoint-8",
    "accelerate_ddp": "accelerate-state/optimizer.bin",
    "lightning_module": "lightning.ckpt",
}
LONGEST = 40
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make recipes installs it")


def test_every_recipe_is_run_and_short():
    recipes = {path.stem: path for path in FOLDER.glob("*.py")}
    assert recipes.keys() == {*FRAMEWORKS, *PLAIN}
    assert all(len(path.read_text().splitlines()) <= LONGEST for path in recipes.values())


@pytest.mark.parametrize("name, processes", [(name, each) for name, (_, many) in FRAMEWORKS.items() for each in many])
def test_recipe_runs(name: str, processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    needs(FRAMEWORKS[name][0])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(FOLDER / f"{name}.py")]
    environment = fresh.environment(**OFFLINE)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    if name in FILES:
        source, target = str(tmp_path / FILES[name]), str(tmp_path / "exact.safetensors")
        assert cli.main(["inspect", source]) == 0
        assert "FlashAdamW" in capsys.readouterr().out
        assert cli.main(["convert", source, target, "--to", "safetensors-fp32"]) == 0
        exact = pytest.importorskip("safetensors.torch").load_file(target)
        assert all(weight.dtype == torch.float32 for weight in exact.values())
        assert any((weight != weight.to(torch.bfloat16).float()).any() for weight in exact.values())  # tails and all


@pytest.mark.parametrize("name", PLAIN)
def test_recipe_of_plain_torch_runs(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flashopt_compile, "FlashAdamW", partial(FlashAdamW, eager=True))  # which takes a second
    found = runpy.run_path(str(FOLDER / f"{name}.py"))
    if name == "schedulers":
        assert set(found["SCHEDULERS"]) == set(lr_scheduler.__all__) - {"LRScheduler"}
    else:
        exact = found["optimizer"].get_fp32_model_state_dict(found["model"])
        expected = found["ema"].module.state_dict()
        assert all((exact[key] - expected[key]).abs().max() < 2e-5 for key in expected)  # 24 bits of weights below 2
        assert any((found["model"].state_dict()[key].float() != expected[key]).any() for key in expected)


def test_lightning_trains_at_every_precision():
    needs("lightning")
    fresh.run(train_at_every_precision)


def train_at_every_precision() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.losses: list[float] = []

        def training_step(self, batch: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(self.layer(batch), batch.roll(1, dims=1))
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> FlashAdamW:
            return FlashAdamW(self.parameters(), lr=1e-2, eager=True)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["gradient_clip_val"] = 1.0
    for precision, dtype in {
        "32-true": torch.float32,
        "bf16-mixed": torch.float32,
        "bf16-true": torch.bfloat16,
        "16-true": torch.float16,
    }.items():
        torch.manual_seed(0)
        trainer: Any = lightning.Trainer(max_epochs=8, accelerator="cpu", precision=precision, **quiet)  # pyright: ignore[reportArgumentType]
        data: Any = torch.randn(128, 64).to(dtype)
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
        assert module.losses[-1] < 0.8 * module.losses[0], (precision, module.losses)
        assert module.layer.weight.dtype == dtype
        tails = [state.get("tail") for state in trainer.optimizers[0].state.values()]
        assert all((tail is None) is (dtype == torch.float32) for tail in tails)


def test_save_and_load_see_through_the_wrapper_of_accelerate(tmp_path: Path):
    needs("accelerate")
    fresh.run(save_from_accelerate, str(tmp_path / "run.ckpt"))


def save_from_accelerate(path: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def new() -> tuple[nn.Module, Any]:
        model = nn.Linear(64, 64).to(torch.bfloat16)
        return accelerator.prepare(model, FlashAdamW(model.parameters(), eager=True))

    (model, optimizer), (other, again) = new(), new()
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    flashopt_compile.save(path, model, optimizer, step=1)
    assert flashopt_compile.load(path, other, again) == {"step": 1}
    assert_identical(stored(again.optimizer), stored(optimizer.optimizer))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_torchtitan_builds_it_in_every_way_and_makes_states_by_a_step_that_changes_nothing(implementation: str):
    needs("torchtitan")
    fresh.run(build_in_torchtitan, implementation)


def build_in_torchtitan(implementation: str) -> None:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    class Container(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return partial(FlashAdamW, eager=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"lr": 1e-2, "weight_decay": 0.1}
    groups = [ParamGroupConfig(pattern=each, optimizer_name="ours", optimizer_kwargs=options) for each in ("0", ".*")]
    config: Any = Container.Config(param_groups=groups, implementation=implementation)  # pyright: ignore[reportArgumentType]
    container = Container(config, model_parts=[model])
    content = container.state_dict()
    ours = container.optimizers[0]
    assert content["param_groups.0.weight.fused"] is (implementation == "fused")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for state in ours.state.values():
        assert int(state["step"]) == 1
        assert not any(value.any() for key, value in state.items() if key != "step")
    assert ours.param_groups[0]["lr"] == 1e-2
    container.load_state_dict(content)
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=4)
    rates = []
    for _ in range(4):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        rates.append(ours.param_groups[0]["lr"])
        container.step()
        schedules.step()
    assert rates[0] < rates[1] > rates[3]
    assert all((model.state_dict()[name] != value).any() for name, value in before.items())
