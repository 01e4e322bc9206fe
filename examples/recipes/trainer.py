"""Hugging Face Trainer: accumulation, clipping, warm-up, and a resumed run with the bits of one that never stopped."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from flashopt_compile import FlashAdamW

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.randint(128, (64, 1)).add(torch.arange(32)).remainder(128)]
HOW = {"max_steps": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
SCHEDULE = {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
REPORTS = {"save_steps": 4, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}


def new(folder: str, with_optimizer: bool) -> Trainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    given: dict[str, Any] = {"optimizer_cls_and_kwargs": (FlashAdamW, {"lr": 3e-3, "weight_decay": 0.1})}
    if with_optimizer:  # one of your own, with parameter groups of your own; Trainer makes the schedule
        given = {"optimizers": (FlashAdamW(model.parameters(), lr=3e-3, weight_decay=0.1), None)}
    return Trainer(model, TrainingArguments(folder, **HOW, **SCHEDULE, **REPORTS), train_dataset=ROWS, **given)


for folder, with_optimizer in {"trainer-state": False, "trainer-state-of-own": True}.items():
    whole, resumed = new(folder, with_optimizer), new(folder, with_optimizer)
    whole.train()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    losses = [each["loss"] for each in whole.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]
    # FlashAdamW lies within Accelerate's wrapper.
    exact, again = (each.optimizer.optimizer.get_fp32_model_state_dict(each.model) for each in (whole, resumed))
    assert all(torch.equal(again[name], weight) for name, weight in exact.items())
    print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}; resumed after 4 of 8 steps, the same weights bit for bit")
