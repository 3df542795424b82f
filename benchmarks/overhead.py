"""What recording costs: CPU time as a ratio to the plain run, bytes per event, its own memory.

    python benchmarks/overhead.py [--runs 5] [--json]

Each workload on the CPU is a process of its own, plain and recorded in turn; the ratio is that of
the medians. On CUDA a plain and a recorded process run their decoding loops in turn, and the ratio
is the median of those of neighbouring loops, so that a machine's other work hits both alike.
``prefill``: SmolLM2-135M's shapes, random weights, a prompt of 4,096 tokens. ``decode``: many tiny
operators, 8 layers of hidden size 256, one token at a time. ``cuda``: decoding with 8 layers on a
GPU, or on a virtual one where there is none, on which a launch costs nothing: the worst case. Only
the workload is timed (all threads of the process, the recorder's too), not the imports. On CUDA the
allocator's history is drained between requests, so that is timed apart: ``ratio`` is the decoding
loop, ``drained_ratio`` has the drain in it. ``128 K`` is one long prompt from start to end.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

LIMITS = {
    "prefill": 1.10,
    "decode": 2.3,
    "cuda": 1.35,
    "cuda with stacks": 1.75,
    "128 K": 10.0,  # seconds
    "bytes_per_event": 16,
    "buffer_bytes": 64 << 20,
}
#: Python frames kept for each allocation.
STACKS = {"cuda": 0, "cuda with stacks": 16}
CUDA_STEPS, CUDA_LOOPS = 50, 12


def work(name: str) -> None:
    """Run one workload in this process and print its CPU seconds."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    warnings.simplefilter("ignore")  # transformers renames arguments from version to version
    torch.set_num_threads(1)  # idle threads of a pool spin, and their spinning would be counted
    torch.manual_seed(0)
    shapes = {
        "prefill": {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
        },
        "decode": {
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 1000,
        },
    }
    config = LlamaConfig(**shapes[name], tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    prompt = torch.arange(4096 if name == "prefill" else 32)[None] % config.vocab_size

    def forward(ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def run(steps: int) -> None:
        cache = DynamicCache(config=config)
        logits = forward(prompt, cache)
        for _ in range(steps):
            logits = forward(logits[:, -1:].argmax(-1), cache)

    with torch.no_grad():
        forward(prompt[:, :32], DynamicCache(config=config))  # warm-up
        start = time.process_time()
        run(0 if name == "prefill" else 400)
        print(time.process_time() - start)


def work_on_cuda(trace: Path | None, stacks: int) -> None:
    """Decode on CUDA once a line of input; print CPU seconds of the loop and of draining."""
    from contextlib import nullcontext

    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from memtrace.record.here import record_here

    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    with record_here(trace, stacks=stacks) if trace else nullcontext() as session:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        prompt = torch.zeros(1, 512, dtype=torch.long, device="cuda")

        def loop() -> tuple[float, float]:
            cache = DynamicCache(config=config)
            ids = prompt
            start = time.process_time()
            for _ in range(CUDA_STEPS):
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = out.logits[:, -1:].argmax(-1)
            end = time.process_time()
            if session is not None:
                session.checkpoint()
            return end - start, time.process_time() - end

        warnings.simplefilter("ignore")  # transformers renames arguments from version to version
        with torch.no_grad():
            loop()  # warm-up
            for _ in sys.stdin:
                print(json.dumps(loop()), flush=True)


def measure_cuda(name: str, runs: int, folder: Path) -> dict[str, object]:
    """Alternate plain and recorded runs of the workload on CUDA."""
    import torch

    environment = dict(os.environ)
    if not torch.cuda.is_available():
        from memtrace.virtual_gpu.launch import environment as virtual

        environment |= virtual(["a100-40g"])
    command = [sys.executable, __file__, "--work", "cuda", "--stacks", str(STACKS[name])]
    loops: dict[str, list[float]] = {"plain": [], "recorded": []}
    drains: list[float] = []
    for number in range(runs):
        trace = folder / f"{name}-{number}.memtrace"
        with (
            _Worker(command, environment) as plain,
            _Worker([*command, "--trace", str(trace)], environment) as recorded,
        ):
            for _ in range(CUDA_LOOPS):
                loops["plain"].append(plain.loop()[0])
                seconds, drain = recorded.loop()
                loops["recorded"].append(seconds)
                drains.append(drain)
        print(f"{name} {number + 1}/{runs}", file=sys.stderr)
    found = _trace_costs(trace)
    pairs = list(zip(loops["plain"], loops["recorded"], drains, strict=True))
    recorded_seconds = statistics.median(one + drain for _, one, drain in pairs)
    return {
        **found,
        "virtual": not torch.cuda.is_available(),
        "seconds": {**loops, "drain": drains},
        "ratio": statistics.median(one / plain for plain, one, _ in pairs),
        "drained_ratio": statistics.median((one + drain) / plain for plain, one, drain in pairs),
        "events_per_second": round(found["events"] / (1 + CUDA_LOOPS) / recorded_seconds),
    }


class _Worker:
    """A process that runs its loop when it is told to."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"a worker ended with {self._process.returncode}")

    def loop(self) -> tuple[float, float]:
        """CPU seconds of the loop, and of draining the history after it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, drain = json.loads(self._process.stdout.readline())
        return seconds, drain


def measure_long_prompt(runs: int, folder: Path) -> dict[str, Any]:
    """Wall time of recording TideKV with Llama-3.1-8B's shapes on a virtual card."""
    command = [sys.executable, "-m", "tidekv", "run", "--model", "llama-3.1-8b"]
    command += ["--prompt-tokens", "131000", "--budget", "4096", "--chunk-size", "16384"]
    command += ["--max-new-tokens", "1", "--device", "cuda", "--schedule", "layer_major"]
    seconds = []
    for number in range(runs):
        trace = folder / f"long-{number}.memtrace"
        recorder = [sys.executable, "-m", "memtrace", "record", "-q", "-o", str(trace)]
        start = time.perf_counter()
        subprocess.run(
            [*recorder, "--virtual-gpu", "a100-40g", "--", *command],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds.append(time.perf_counter() - start)
        print(f"128 K {number + 1}/{runs}: {seconds[-1]:.1f} s", file=sys.stderr)
    return {**_trace_costs(trace), "seconds": seconds, "median": statistics.median(seconds)}


def _trace_costs(trace: Path) -> dict[str, Any]:
    (process,) = (path for path in trace.iterdir() if path.is_dir())
    manifest = json.loads((process / "manifest.json").read_text())
    events = manifest["events"]
    return {
        "events": events,
        "bytes_per_event": (process / "events.arrow").stat().st_size / events,
        "trace_bytes": sum(path.stat().st_size for path in trace.rglob("*") if path.is_file()),
        "buffer_bytes": manifest["recorder"]["peak_buffer_bytes"],
    }


def measure(name: str, runs: int, folder: Path) -> dict[str, object]:
    """Alternate plain and recorded runs of one workload."""
    command = [sys.executable, __file__, "--work", name]
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    for number in range(runs):
        trace = folder / f"{name}-{number}.memtrace"
        recorder = [sys.executable, "-m", "memtrace", "record", "-q", "-o", str(trace), "--"]
        for kind, prefix in (("plain", []), ("recorded", recorder)):
            out = subprocess.run(
                prefix + command, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            seconds[kind].append(float(out))
            print(f"{name} {number + 1}/{runs} {kind}: {float(out):.2f} s", file=sys.stderr)
    found = _trace_costs(trace)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        **found,
        "seconds": seconds,
        "ratio": medians["recorded"] / medians["plain"],
        "events_per_second": round(found["events"] / medians["recorded"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", choices=("cpu", "cuda"), help="some of the workloads")
    parser.add_argument("--work", choices=("prefill", "decode", "cuda"), help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stacks", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work == "cuda":
        work_on_cuda(args.trace, args.stacks)
        return 0
    if args.work:
        work(args.work)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        if args.only != "cuda":
            for name in ("prefill", "decode"):
                found[name] = measure(name, args.runs, Path(folder))
        if args.only != "cpu":
            for name in STACKS:
                found[name] = measure_cuda(name, args.runs, Path(folder))
            found["128 K"] = measure_long_prompt(args.runs, Path(folder))
    if args.json:
        print(json.dumps({"schema": 1, "limits": LIMITS, **found}, indent=1))
    else:
        for name, one in found.items():
            if name == "128 K":
                print(
                    f"{name:<16} TideKV recorded on a virtual a100-40g in {one['median']:.1f} s, "
                    f"imports and all (limit {LIMITS[name]}), {one['events']:,} events"
                )
                continue
            drained = one.get("drained_ratio")
            also = "" if drained is None else f", {drained:.2f} with the drain"
            print(
                f"{name:<16} CPU recorded / plain {one['ratio']:.3f} (limit {LIMITS[name]}){also}, "
                f"{one['events']:,} events, {one['events_per_second']:,} events/s, "
                f"{one['bytes_per_event']:.1f} bytes/event (limit {LIMITS['bytes_per_event']}), "
                f"buffers {one['buffer_bytes'] / 2**20:.1f} MiB (limit 64)"
            )
    long = found.pop("128 K", None)
    within = long is None or long["median"] <= LIMITS["128 K"]
    within &= all(
        one["ratio"] <= LIMITS[name]
        and one["bytes_per_event"] <= LIMITS["bytes_per_event"]
        and one["buffer_bytes"] <= LIMITS["buffer_bytes"]
        for name, one in found.items()
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
