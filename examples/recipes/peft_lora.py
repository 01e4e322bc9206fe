"""PEFT LoRA: FlashAdamW trains bf16 adapters of a frozen bf16 model; saved adapters load into a fresh model."""

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from flashopt_compile import FlashAdamW

torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).to(torch.bfloat16)
frozen = copy.deepcopy(base)
how = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(base, how, autocast_adapter_dtype=False)  # PEFT makes adapters in fp32 unless told not to
optimizer = FlashAdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2, weight_decay=0.0)

ids = torch.randint(128, (16, 1)).add(torch.arange(32)).remainder(128)
losses = []
for _ in range(30):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {optimizer.memory()['per_parameter']:.2f} bytes per adapter weight")
model.save_pretrained("adapter")
loaded = PeftModel.from_pretrained(frozen, "adapter", autocast_adapter_dtype=False)
assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
