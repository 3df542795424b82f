"""Allocated peak of building a compact cache, beside the paper's: Llama-3.1-8B's shapes.

    python benchmarks/construction_peak.py [--prompts 65536 131072] [--no-meta] [--json]

BF16, one prompt, 4,096 rows kept per layer and KV head, FlashAttention. Runs on a GPU, or on a
virtual A100-40GB where there is none: the allocator is PyTorch's own either way. The figure is
``torch.cuda.max_memory_allocated()`` of the prefill, with the weights and the workspace of cuBLAS
in it; context and other process memory are not. As a cross-check TideKV also runs on meta tensors,
whose live bytes the recorder counts: they differ by that workspace, by what kernels take below the
dispatcher, and by the allocator's rounding to 512 bytes. (Parts on the host need a host, and
transformers' own attention is dense on meta tensors, so other rows have no such column.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
BUDGET = 4096


@dataclass(frozen=True)
class Row:
    """One way to build the cache."""

    title: str
    schedule: str
    options: dict[str, Any] = field(default_factory=dict)
    #: Parts of the model that are on the host: "embeddings" (and head), "layers".
    host: tuple[str, ...] = ()
    #: GiB at 64 K and 128 K: in the paper, and to be reached.
    paper: tuple[float | None, float | None] = (None, None)
    limit: tuple[float | None, float | None] = (None, None)
    #: Whether it runs on meta tensors.
    on_meta: bool = False


_TIGHT = {"chunk_size": 512, "piece_rows": 256}
_TIDE = (16.639, 17.640)
ROWS = (
    Row("SnapKV, whole prompt", "whole_prompt", paper=(22.748, 30.031)),
    Row("SnapKV, whole prompt, MLP in pieces of 4096", "whole_prompt", {"mlp_rows": 4096}),
    Row("TideKV, C = 2048", "layer_major", {"chunk_size": 2048}, (), _TIDE, (16.30, 17.05), True),
    Row("TideKV, C = 512, pieces of 256", "layer_major", _TIGHT, (), _TIDE, (16.23, 16.98), True),
    Row("  embeddings and head on the host", "layer_major", _TIGHT, ("embeddings",)),
    Row("  finished caches parked", "layer_major", {**_TIGHT, "park_caches": True}),
    Row("  hidden bridge on the host", "layer_major", {**_TIGHT, "host_bridge": True}),
    Row(
        "  weights streamed",
        "layer_major",
        {**_TIGHT, "stream_weights": True},
        ("embeddings", "layers"),
        limit=(3.0, None),
    ),
    Row(
        "  all of these",
        "layer_major",
        {**_TIGHT, "stream_weights": True, "park_caches": True, "host_bridge": True},
        ("embeddings", "layers"),
    ),
)


def work(numbers: list[int], prompts: list[int], device: str) -> None:
    """Measure these rows, which have the same parts on the host; print a line of JSON for each."""
    import torch

    import tidekv
    from memtrace.analysis.summary import summarise
    from memtrace.record.here import record_here
    from memtrace.trace.reader import open_trace
    from tidekv.schedules import SCHEDULES

    def run(model: Any, row: Row, tokens: int) -> None:
        options = dict(row.options)
        if row.host:
            options["device"] = device
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        tidekv.prefill(
            model,
            ids,
            schedule=SCHEDULES[row.schedule](**options),
            budget=BUDGET,
            attention="flash_attention_2",
        )

    if device != "meta":
        model = _model(ROWS[numbers[0]].host, device)
    for number in numbers:
        for tokens in prompts:
            if device == "meta":
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "run.memtrace"
                    with record_here(path, source="tensors"):
                        run(_model((), device), ROWS[number], tokens)
                    (account,) = (
                        one for one in summarise(open_trace(path)).accounts if one.device == "meta"
                    )
                    peak = account.peak.allocated
            else:
                torch.cuda.reset_peak_memory_stats()
                run(model, ROWS[number], tokens)
                peak = torch.cuda.max_memory_allocated()
            print(json.dumps({"row": number, "prompt": tokens, "peak": peak}), flush=True)


def _model(host: tuple[str, ...], device: str) -> Any:
    """Llama-3.1-8B without trained weights, some parts of it on the host."""
    from tidekv.loading import load_model

    if device == "meta":
        return load_model("llama-3.1-8b", weights="meta")[0]
    home = "cpu" if "layers" in host else device
    model, _ = load_model("llama-3.1-8b", device=home, weights="empty")
    if "embeddings" in host:
        model.model.embed_tokens.cpu()
        model.lm_head.cpu()
    return model


def measure(prompts: list[int], device: str) -> dict[tuple[int, int], int]:
    """Peaks by row and prompt, in a process for each placement of the model."""
    environment = dict(os.environ)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            from memtrace.virtual_gpu.launch import environment as virtual

            environment |= virtual(["a100-40g"])
    found: dict[tuple[int, int], int] = {}
    for host in dict.fromkeys(row.host for row in ROWS):
        numbers = [n for n, row in enumerate(ROWS) if row.host == host]
        if device == "meta":
            numbers = [n for n in numbers if ROWS[n].on_meta]
        if not numbers:
            continue
        command = [sys.executable, __file__, "--work", device, "--rows", *map(str, numbers)]
        command += ["--prompts", *map(str, prompts)]
        out = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
        for line in out.splitlines():
            one = json.loads(line)
            found[one["row"], one["prompt"]] = one["peak"]
            print(f"{ROWS[one['row']].title.strip()}, {one['prompt']:,}", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[65536, 131072], metavar="N")
    parser.add_argument("--no-meta", action="store_true", help="leave the cross-check out")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.rows, args.prompts, args.work)
        return 0
    peaks = measure(args.prompts, "cuda")
    meta = {} if args.no_meta else measure(args.prompts, "meta")
    published = {65536: 0, 131072: 1}
    within, rows = True, []
    for number, row in enumerate(ROWS):
        for tokens in args.prompts:
            peak, which = peaks[number, tokens], published.get(tokens)
            paper = None if which is None else row.paper[which]
            limit = None if which is None else row.limit[which]
            within &= limit is None or peak <= limit * GIB
            rows.append(
                {
                    "method": row.title.strip(),
                    "prompt": tokens,
                    "options": {**asdict(row), "budget": BUDGET},
                    "allocated_peak": peak,
                    "live_on_meta": meta.get((number, tokens)),
                    "paper_gib": paper,
                    "limit_gib": limit,
                }
            )
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows}, indent=1))
    else:
        _print(rows)
    return 0 if within else 1


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'GiB allocated at the peak':<46}{'tokens':>8}{'ours':>9}{'paper':>9}", end="")
    print(f"{'to reach':>10}{'meta':>9}")
    for row in rows:
        columns = [row["paper_gib"], row["limit_gib"]]
        on_meta = row["live_on_meta"]
        print(
            f"{row['options']['title']:<46}{row['prompt']:>8}{row['allocated_peak'] / GIB:>9.3f}"
            + "".join(
                f"{'-' if value is None else format(value, '.3f'):>{width}}"
                for value, width in zip(
                    [*columns, None if on_meta is None else on_meta / GIB], (9, 10, 9), strict=True
                )
            )
        )


if __name__ == "__main__":
    sys.exit(main())
