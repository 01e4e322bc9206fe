"""Lightning in bf16 throughout (`bf16-true`): clipping, a schedule, and a resumed run with the bits of a whole one."""

import lightning
import torch
from torch import nn

from flashopt_compile import FlashAdamW


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch), batch.roll(1, dims=1))

    def configure_optimizers(self) -> tuple[list[FlashAdamW], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = FlashAdamW(self.parameters(), lr=1e-2, weight_decay=0.1)  # Lightning has cast the model by now
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


HOW = {"precision": "bf16-true", "accelerator": "cpu", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def run(epochs: int, path: str | None = None) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(max_epochs=epochs, **HOW, **QUIET)
    batches = torch.utils.data.DataLoader(torch.randn(256, 64, dtype=torch.bfloat16), batch_size=16)
    trainer.fit(Module(), batches, ckpt_path=path)
    return trainer


run(2).save_checkpoint("lightning.ckpt")  # which flashopt inspect and convert read
whole, resumed = (
    each.optimizers[0].get_fp32_model_state_dict(each.lightning_module) for each in (run(4), run(4, "lightning.ckpt"))
)
assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
print("resumed after 2 of 4 epochs, the same weights bit for bit")
