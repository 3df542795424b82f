"""Read a prompt of 64 K tokens with the shapes of an 8B model, cut to 7 layers: plain PyTorch."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=7,
    num_attention_heads=32,
    num_key_value_heads=32,  # fewer need another kernel in float32 before torch 2.14
    vocab_size=128256,
    max_position_embeddings=131072,
)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).eval()  # 11.0 GB in float32
ids = torch.randint(0, config.vocab_size, (1, 65536)).to("cuda")
with torch.inference_mode():
    out = model(ids, use_cache=True, logits_to_keep=1)
print("read", tuple(out.logits.shape))
