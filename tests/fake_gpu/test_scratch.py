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
calls |= {
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
    assert {name for name in virtual if virtual[name] != fake.get(name)} - _UNKNOWN == set()


#: Take what :mod:`memtrace.fake_gpu.scratch` names as unknown.
_UNKNOWN = {"repeated"}


def test_an_allocator_of_the_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="fake doesn't model the allocator cudaMallocAsync"):
        dry_run(
            [sys.executable, "-c", ""],
            device="a100-40g",
            out=tmp_path / "run",
            engine="fake",
            allocator="backend:cudaMallocAsync",
        )
