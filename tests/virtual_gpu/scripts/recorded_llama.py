"""Record three requests of a small Llama in this process; print what the allocator counted.

recorded_llama.py RUN [--source S] [--attention A] [--without NAME …] [--ring N] [--stacks N]

``--without`` takes a function from ``torch._C`` first, as in an older PyTorch.
"""

import argparse
import json

import torch

torch.backends.cuda.enable_cudnn_sdp(False)

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from memtrace import scopes  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("--source", default="auto")
parser.add_argument("--attention", default="sdpa")
parser.add_argument("--without", nargs="*", default=[])
parser.add_argument("--ring", type=int)
parser.add_argument("--stacks", type=int, default=0)
args = parser.parse_args()
for name in args.without:
    vars(torch._C).pop(name, None)  # which an older PyTorch never had

from memtrace.record import cuda  # noqa: E402
from memtrace.record.here import record_here  # noqa: E402
from tests.virtual_gpu.scripts.counting import counted  # noqa: E402

if args.ring:
    cuda.RING = args.ring

CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=2000,
    attn_implementation=args.attention,
)


def answer(model: LlamaForCausalLM, length: int, steps: int) -> None:
    cache = DynamicCache(config=CONFIG)
    ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
    for _ in range(steps):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = out.logits[:, -1:].argmax(-1)


boundaries = []
with torch.inference_mode(), record_here(args.run, source=args.source, stacks=args.stacks) as one:
    with torch.device("cuda"):
        model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    boundaries.append([one.checkpoint(), counted()])
    for number, length in enumerate((100, 900, 333)):
        with scopes.request(f"q{number}", prompt_tokens=length):
            answer(model, length, 4)
        boundaries.append([one.checkpoint(), counted()])
print(json.dumps(boundaries))
