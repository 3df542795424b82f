"""Time to first token and decoding speed of TideKV beside whole-prompt SnapKV, on the CPU.

    python benchmarks/prefill_speed.py [--tokens 4096] [--runs 7] [--chunk-size 512] [--json]

SmolLM2-135M, the same prompt and budget, both schedules in one process and in turn, each first in
every other pair, so that a machine's other work hits both alike; the ratio is the median of those
of neighbouring runs. The share of scoring and compression is time within those phases of TideKV's
prefill.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import tidekv
from memtrace import scopes
from tidekv.schedules import LayerMajor, WholePrompt

LIMITS = {"first_token": 1.05, "decode": 0.03}
BUDGET, NEW = 1024, 64


class Phases:
    """Seconds spent in each phase; what :mod:`memtrace.scopes` calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def scope(self, kind: str, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if kind == "phase":
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def component(self, component: str) -> Iterator[None]:
        yield

    def retag(self, tensor: Any, component: str) -> None:
        pass


def run(model: Any, ids: torch.Tensor, schedule: Any) -> tuple[float, float, dict[str, float]]:
    """Seconds to the first token, seconds of decoding, seconds by phase."""
    phases = Phases()
    scopes.attach(phases)
    start = time.perf_counter()
    prefilled = tidekv.prefill(model, ids, schedule=schedule, budget=BUDGET)
    prefilled.logits.argmax(-1)
    first = time.perf_counter()
    scopes.attach(None)
    tidekv.decode(model, ids, prefilled, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return first - start, time.perf_counter() - first, dict(phases.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default: 4096)")
    parser.add_argument("--runs", type=int, default=7, help="pairs of runs (default: 7)")
    parser.add_argument("--chunk-size", type=int, default=512, help="TideKV's (default: 512)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()

    model, _ = tidekv.load_model("smollm2")
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, args.tokens), generator=seed)
    schedules = {"whole_prompt": WholePrompt(), "layer_major": LayerMajor(args.chunk_size)}
    for schedule in schedules.values():  # warm-up
        run(model, ids[:, : BUDGET + 1], schedule)
    found: dict[str, list[Any]] = {name: [] for name in schedules}
    for number in range(args.runs):
        turn = list(schedules.items())
        for name, schedule in turn if number % 2 == 0 else reversed(turn):
            found[name].append(run(model, ids, schedule))
            first, decode, _ = found[name][-1]
            print(
                f"{number + 1}/{args.runs} {name}: {first:.2f} s to the first token, "
                f"{NEW / decode:.1f} tokens/s",
                file=sys.stderr,
            )
    pairs = list(zip(found["whole_prompt"], found["layer_major"], strict=True))
    first = statistics.median(tide[0] / whole[0] for whole, tide in pairs)
    decode = statistics.median(tide[1] / whole[1] for whole, tide in pairs)
    shares = {
        phase: statistics.median(seconds[phase] / ttft for ttft, _, seconds in found["layer_major"])
        for phase in ("score", "compress")
    }
    if args.json:
        document = {"schema": 1, "limits": LIMITS, "tokens": args.tokens, "budget": BUDGET}
        document |= {"chunk_size": args.chunk_size, "first_token": first, "decode": decode}
        document |= {"shares": shares, "runs": found}
        print(json.dumps(document, indent=1))
    else:
        whole, tide = (
            statistics.median(one[0] for one in found[name])
            for name in ("whole_prompt", "layer_major")
        )
        print(
            f"first token  {tide:.2f} s layer-major, {whole:.2f} s whole-prompt: "
            f"{first:.3f} (limit {LIMITS['first_token']})\n"
            f"decoding     time per token {decode:.3f} of whole-prompt's (limit 1 ± "
            f"{LIMITS['decode']})\n"
            f"scoring      {shares['score']:.1%} of the time to the first token, compression "
            f"{shares['compress']:.1%}"
        )
    within = first <= LIMITS["first_token"] and abs(decode - 1) <= LIMITS["decode"]
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
