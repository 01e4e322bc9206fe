"""TRL's SFTTrainer: completions trained with FlashAdamW, the tokenizer and the model made here, without the hub."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from flashopt_compile import FlashAdamW

words = "<pad> <end> <unk> one two three four five six seven eight nine ten comes after".split()
tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
numbers = words[3:13]
rows = [{"prompt": f"after {numbers[i]} comes ", "completion": numbers[i + 1]} for i in range(9)]

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes, eos_token_id=1, pad_token_id=0))
arguments = SFTConfig(
    "sft-state",
    max_steps=60,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    report_to="none",
    use_cpu=True,
    bf16=False,  # autocast, which a bf16 model does not need
)
trainer = SFTTrainer(
    model.to(torch.bfloat16),
    arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    optimizer_cls_and_kwargs=(FlashAdamW, {"lr": 1e-2, "weight_decay": 0.1}),
)
trainer.train()
answer = model.generate(**tokenizer("after four comes", return_tensors="pt"), max_new_tokens=1, do_sample=False)
assert tokenizer.decode(answer[0]) == "after four comes five"
