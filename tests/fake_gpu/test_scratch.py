"""What kernels take below the dispatcher is what PyTorch's own host code asks for."""

import json
import sys
from pathlib import Path

import pytest

from memtrace import dry_run
from memtrace.errors import MemtraceError
from tests.virtual_gpu.conftest import obstacle

CALLS = """
import json, torch

def new(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype)

half, rows = torch.bfloat16, new(8, 4096, 64, dtype=torch.bfloat16)
host = torch.empty(8, 64, 64, dtype=half)
calls = {}
for kind in (torch.uint8, half, torch.float32, torch.int64):
    for shape in ((1, 5000), (4, 30_000), (200, 5000), (8, 1000)):
        values = new(*shape, dtype=kind)
        calls["sort", shape, kind] = lambda values=values: values.sort(dim=-1, stable=True)
    for shape in ((8, 30_000), (500, 3000), (8, 3000)):
        for k in (16, 2000):
            values = new(*shape, dtype=kind)
            calls["topk", shape, kind, k] = lambda values=values, k=k: values.topk(k)
for kind in (torch.bool, half, torch.float32):
    for shape in ((300_000,), (8, 4096, 64), (512, 1024), (30_000, 3)):
        values = new(*shape, dtype=kind)
        for name in ("sum", "amax", "any"):
            for dim in (None, -1, 0):
                options = {} if dim is None else {"dim": dim}
                what = getattr(values, name)
                calls[name, shape, kind, dim] = lambda what=what, options=options: what(**options)
for kind in (torch.bool, half, torch.float32, torch.int64):
    for count in (1, 500, 4097, 1_000_000):
        values = new(count, dtype=kind)
        calls["nonzero", count, kind] = lambda values=values: values.nonzero()
        calls["nonzero_static", count, kind] = lambda values=values: values.nonzero_static(size=7)
        for name in ("cumsum", "cumprod"):
            calls[name, count, kind] = lambda what=getattr(values, name): what(0)
pieces = new(64, 128)[:, ::2]
calls |= {
    "cumsum of columns": lambda: new(300, 500).T.cumsum(-1),
    "cumsum of another type": lambda: new(300, 500).cumsum(-1, dtype=torch.float64),
    "logcumsumexp": lambda: new(100_000).logcumsumexp(0),
    "nonzero of columns": lambda: new(300, 500).T.nonzero(),
    "nonzero that is known": lambda: torch.tensor([[0, 1, 1]] * 3000, device="cuda").nonzero(),
    "rows by a mask": lambda: new(900, 5)[torch.tensor([False, True, True] * 300, device="cuda")],
    "elements by a mask": lambda: new(300, 500)[new(300, 500, dtype=torch.bool)],
    "masked_select": lambda: new(300, 500).masked_select(new(300, 500, dtype=torch.bool)),
    "places that lie otherwise": lambda: new(9, 9, 5)[
        torch.arange(9, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda").expand(9)
    ],
    "product of pieces": lambda: pieces @ new(64, 8),
    "product of two with pieces": lambda: pieces @ pieces,
    "sum and product of pieces": lambda: torch.addmm(new(64), pieces, pieces),
    "vector and pieces": lambda: pieces @ new(64),
    "products of pieces": lambda: torch.bmm(new(8, 64, 128)[:, :, ::2], new(8, 64, 32)),
    "products of columns": lambda: torch.bmm(new(8, 128, 64).mT, new(8, 32, 128).mT),
    "product of a column that is repeated": lambda: new(64, 1).expand(64, 64) @ new(64, 64),
    **{
        f"memory-efficient attention, {size} of {kind}": lambda size=size, kind=kind: (
            torch.ops.aten._scaled_dot_product_efficient_attention(
                *[new(1, 4, 100, size, dtype=kind)] * 3, None, True
            )
        )
        for size in (64, 128, 136, 288)
        for kind in (half, torch.float32)
    },
    "dropout": lambda: torch.nn.functional.dropout(rows, 0.5),
    "group norm": lambda: torch.nn.functional.group_norm(new(4, 64, 9), 8, new(64), new(64)),
    "bags": lambda: torch.nn.functional.embedding_bag(
        new(64, 16, dtype=torch.int64), new(100, 64), mode="mean"
    ),
    "both extremes": lambda: new(300_000).aminmax(),
    "number of what isn't 0": lambda: rows.count_nonzero(),
    "logsumexp": lambda: rows.float().logsumexp(-1),
    "choice": lambda: new(4, 30_000).softmax(-1).multinomial(1),
    "choices of a row": lambda: new(30_000).multinomial(50),
    "choices": lambda: new(4, 300).multinomial(50),
    "few wanted": lambda: torch.isin(new(8, 16), new(3)),
    "none but few": lambda: torch.isin(new(8, 16), new(3), invert=True),
    "distances": lambda: torch.cdist(new(100, 64), new(200, 64)),
    "long topk": lambda: new(4, 60_000).topk(9000),
    "sorted rows of a slice": lambda: rows[:, :, 0].float()[:, 5:].sort(dim=-1),
    "variance": lambda: new(300_000).var(),
    "norm": lambda: torch.linalg.vector_norm(rows.float(), dim=-2),
    "largest and where": lambda: new(1 << 20).max(-1),
    "where": lambda: new(1 << 20).argmax(),
    "mean over rows": lambda: rows[:, 8:].mean(1),
    "mean into": lambda: torch.mean(rows, 1, out=new(8, 64, dtype=half)),
    "softmax that is never nan": lambda: torch.ops.aten._safe_softmax(rows, -1),
    "power of a number": lambda: 5.0 ** new(64),
    "embedding by a slice": lambda: torch.nn.functional.embedding(
        new(3, 100, dtype=torch.int64)[:, :50], new(100, 64)
    ),
    "pieces to the host": lambda: host.copy_(rows[:, :64]),
    "pieces from the host": lambda: rows[:, :64].copy_(host),
    "pieces anew on the host": lambda: rows[:, :64].cpu(),
    "another type, later": lambda: host.to("cuda", torch.float32, non_blocking=True),
    "repeated": lambda: new(4, dtype=torch.int64).repeat_interleave(
        new(4, dtype=torch.int64), output_size=9
    ).shape,
    "pinned": lambda: host.pin_memory().shape,
}
for name, call in calls.items():
    torch.cuda.memory._record_memory_history(stacks="python")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    out = call()
    done = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    del out
    steps = [(e["action"], e["size"]) for e in done if e["action"] in ("alloc", "free_requested")]
    print(json.dumps([str(name), steps]))
torch.cuda.memory._record_memory_history(None)
products = []
torch._C._cuda_clearCublasWorkspaces()
for _ in range(2):
    held = torch.cuda.memory_allocated()
    new(64, 64) @ new(64, 64)
    products.append(torch.cuda.memory_allocated() - held)
    torch._C._cuda_clearCublasWorkspaces()
print(json.dumps(["workspaces", products]))
"""


def steps_of(engine: str, card: str, folder: Path) -> dict[str, object]:
    out = folder / f"{engine}-{card}.memtrace"
    with out.with_suffix(".said").open("w+") as said:
        trace = dry_run(
            [sys.executable, "-c", CALLS],
            device=card,
            out=out,
            engine=engine,
            source="none",
            stdout=said.fileno(),
        )
        assert trace.manifest["exit"]["code"] == 0
        said.seek(0)
        return dict(map(json.loads, said))


@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100-40g", "h100-80g", "rtx-4090-24g"])
def test_operators_take_and_give_back_what_they_do_on_the_virtual_gpu(
    card: str, tmp_path: Path
) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    virtual = steps_of("virtual", card, tmp_path)
    fake = steps_of("fake", card, tmp_path)
    assert {name for name in virtual if virtual[name] != fake.get(name)} == set()


def test_an_allocator_of_the_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="fake doesn't model the allocator cudaMallocAsync"):
        dry_run(
            [sys.executable, "-c", ""],
            device="a100-40g",
            out=tmp_path / "run",
            engine="fake",
            allocator="backend:cudaMallocAsync",
        )
