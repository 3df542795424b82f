"""Programs on a fake GPU take the same paths, allocate the same bytes and end the same way."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from memtrace import dry_run
from memtrace.analysis.summary import summarise
from memtrace.errors import MemtraceError
from memtrace.trace.reader import Trace
from tests.virtual_gpu.conftest import obstacle
from tests.virtual_gpu.vectors import TORCH

PROGRAM = """
import json, torch
import torch.nn.functional as F

said = {}
said["seen"] = [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name()]
said["capability"] = torch.cuda.get_device_capability()
x = torch.randn(512, 1024, device="cuda")
before = torch.cuda.memory_allocated()
y = x @ torch.randn(1024, 1024, device="cuda")
said["kinds"] = [type(x) is torch.Tensor, str(x.device), x.is_cuda]
said["product"] = torch.cuda.memory_allocated() - before  # and cuBLAS's workspace
del y
said["shapes"] = [list(x[0].shape), list(x[:, 3:5].shape), list(x.T.shape)]
said["views"] = x[1].data_ptr() - x.data_ptr()
linear = torch.nn.Linear(1024, 1024)
weight = linear.weight
linear.to("cuda")
said["parameter"] = [linear.weight is weight, type(weight).__name__, str(weight.device)]
with torch.inference_mode():
    said["linear"] = list(linear(x).shape)
try:
    linear(x).sum().backward()
except RuntimeError as error:
    said["gradients"] = str(error)
ids = torch.tensor([3, 1, 2], device="cuda")
said["known"] = [ids.tolist(), (ids > 1).nonzero().flatten().tolist(), int(ids.argmax())]
said["order"] = list(torch.randperm(9, device="cuda").shape)
said["unknown"] = x.cpu().sum().item()
said["shown"] = "size=(512, 1024)" in str(x)
said["pinned"] = list(torch.empty(3, pin_memory=True).shape)
x.resize_(1024, 1024)
said["grown"] = x.untyped_storage().nbytes()
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    z = torch.ones(1 << 20, device="cuda")
z.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(stream)
torch.cuda.synchronize()
q = torch.empty(1, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
said["attention"] = list(F.scaled_dot_product_attention(q, q, q, is_causal=True).shape)
try:
    torch.empty(1 << 40, device="cuda")
except torch.OutOfMemoryError as error:
    said["oom"] = str(error).partition(" GPU 0")[0]
said["goes on"] = torch.zeros(3, device="cuda").shape[0]
torch.cuda.empty_cache()
said["peak"] = torch.cuda.max_memory_allocated()
print(json.dumps(said))
"""


def planned(
    script: str,
    out: Path,
    *,
    engine: str = "fake",
    allocator: str = "",
    source: str = "auto",
    follow_values: bool = True,
) -> tuple[Trace, str]:
    """A dry run of a script, and what it printed."""
    with out.with_suffix(".said").open("w+") as said:
        trace = dry_run(
            [sys.executable, "-c", script],
            device="rtx-3090-24g",
            out=out,
            engine=engine,
            allocator=allocator,
            source=source,
            stdout=said.fileno(),
            follow_values=follow_values,
        )
        said.seek(0)
        return trace, said.read()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake")


@pytest.fixture(scope="module")
def ran(folder: Path) -> tuple[Trace, dict[str, object]]:
    trace, said = planned(PROGRAM, folder / "run.memtrace", allocator="expandable_segments:True")
    assert trace.manifest["exit"] == {"code": 0, "signal": None}
    return trace, json.loads(said)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("seen", [True, 1, "NVIDIA GeForce RTX 3090"]),
        ("capability", [8, 6]),
        ("kinds", [True, "cuda:0", True]),
        # From torch 2.15 on cuBLAS's workspace is given back after the product.
        ("product", 512 * 1024 * 4 + (8_519_680 if TORCH < (2, 15) else 0)),
        ("shapes", [[1024], [512, 2], [1024, 512]]),
        ("views", 4096),
        ("parameter", [True, "Parameter", "cuda:0"]),
        ("linear", [512, 1024]),
        ("gradients", "a fake GPU can't compute gradients; use the engine virtual"),
        ("known", [[3, 1, 2], [0, 2], 0]),
        ("unknown", 0.0),
        ("shown", True),
        ("pinned", [3]),
        ("grown", 4 << 20),
        ("attention", [1, 8, 256, 64]),
        ("oom", "CUDA out of memory. Tried to allocate 4096.00 GiB."),
        ("goes on", 3),
    ],
)
def test_a_program_sees_what_it_would_see_on_a_card(
    ran: tuple[Trace, dict[str, object]], asked: str, answer: object
) -> None:
    assert ran[1][asked] == answer


def test_its_run_is_a_run_like_another(ran: tuple[Trace, dict[str, object]]) -> None:
    trace, said = ran
    summary = summarise(trace)
    assert summary.knowledge == "modelled"
    assert summary.planned is not None
    assert summary.planned.engine == "fake"
    one = summary.primary
    assert one is not None
    assert one.peak.allocated == said["peak"]
    assert one.identities.hold
    assert one.reserved_peak is not None
    assert one.reserved_peak >= one.peak.allocated
    assert [oom.requested for oom in summary.ooms] == [1 << 42]
    assert one.peak.components["backend"] >= 8_519_680


def test_what_is_not_modelled_is_named(ran: tuple[Trace, dict[str, object]]) -> None:
    planned = summarise(ran[0]).planned
    assert planned is not None
    assert any("scratch memory of" in text and "randperm" in text for text in planned.unknown)


def test_expandable_segments_are_the_simulated_allocator_s(
    ran: tuple[Trace, dict[str, object]],
) -> None:
    process = ran[0].processes[0]
    settings = process.manifest["cuda"]["allocator_settings"]
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


UNWRITABLE = """
import resource, torch
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for size in range(20_000):
    torch.empty(size)
"""


def test_a_run_that_could_not_be_written_is_no_plan(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNWRITABLE]
    with pytest.raises(MemtraceError, match="couldn't be written in full"):
        dry_run(command, device="cpu", out=tmp_path / "run", source="tensors")


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="'nothing' is no setting"):
        dry_run(
            [sys.executable, "-c", ""],
            device="a100-40g",
            out=tmp_path / "run",
            engine="fake",
            allocator="nothing:1",
        )


MODELS = """
import json, torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

taken = []
for dtype, attention in (("bfloat16", "sdpa"), ("float32", "sdpa"), ("bfloat16", "eager")):
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).to("cuda").eval()
    ids = torch.arange(700, device="cuda")[None] % 4096
    out = model.generate(ids, attention_mask=ids > -1, max_new_tokens=3, do_sample=False)
    taken.append([out.shape[1], torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()])
    del model, out
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
q = torch.empty(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
for keys in (4096, 4104, 4100, 4097):
    k = torch.empty(1, 4, keys, 64, device="cuda", dtype=q.dtype)
    for mask in (torch.empty(64, keys, device="cuda", dtype=q.dtype),
                 torch.empty(64, 8192, device="cuda", dtype=q.dtype)[:, :keys],
                 torch.empty(1, keys, device="cuda", dtype=q.dtype).expand(64, keys),
                 torch.empty(keys, 64, device="cuda", dtype=q.dtype).T):
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
print(json.dumps(taken))
"""


def test_both_engines_allocate_the_same_bytes(folder: Path) -> None:
    """By each kernel of attention: flash, memory-efficient, plain operators; masks of all kinds."""
    if reason := obstacle():
        pytest.skip(reason)
    runs = {
        engine: planned(MODELS, folder / f"{engine}.memtrace", engine=engine)
        for engine in ("virtual", "fake")
    }
    taken = {engine: json.loads(said) for engine, (_, said) in runs.items()}
    assert taken["fake"] == taken["virtual"]
    assert [tokens for tokens, _, _ in taken["fake"]] == [703] * 3
    sizes = {}
    for engine, (trace, _) in runs.items():
        process = trace.processes[0]
        mine = process.contexts_on("cuda:0")[process.events["context"]]
        sizes[engine] = Counter(process.events["requested"][mine].tolist())
        if TORCH < (2, 14):  # whose CUB takes other tables of some KiB
            sizes[engine] = Counter({n: count for n, count in sizes[engine].items() if n > 4096})
    assert sizes["fake"] == sizes["virtual"]


PRODUCTS = """
import json, torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def steps(call):
    torch.cuda.memory._record_memory_history(stacks="python", clear_history=True)
    out = call()
    shape = [list(out.shape), list(out.stride()), str(out.dtype), out.requires_grad]
    del out
    torch._C._cuda_clearCublasWorkspaces()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return shape, [(entry["action"], entry["size"]) for entry in trace]

def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="cuda", dtype=dtype)

weight, bias = new(96, 64), new(96)
parameter = torch.nn.Parameter(new(96, 64))
inputs = [new(*shape) for shape in ((64,), (7, 64), (2, 7, 64), (1, 1, 64), (2, 3, 7, 64), (0, 64))]
inputs += [new(7, 2, 64).transpose(0, 1), new(7, 128)[:, :64]]
steps(lambda: F.linear(inputs[1], weight))  # from here on there is room
for x in inputs:
    for w, b in ((weight, None), (parameter, None), (weight, bias), (new(64, 96).T, None),
                 (new(96, 128)[:, ::2], None)):
        for grows in (False, True):
            with torch.set_grad_enabled(grows):
                alone = steps(lambda: F.linear(x, w, b))
                with Sees():
                    seen = steps(lambda: F.linear(x, w, b))
                print(json.dumps([list(x.shape), alone, seen]))
try:
    F.linear(new(7, 60), weight)
except RuntimeError as error:
    print(json.dumps([str(error)[:4], 1, 1]))
"""


def test_products_in_one_step_take_what_their_parts_do(folder: Path) -> None:
    _, said = planned(PRODUCTS, folder / "products.memtrace", source="none", follow_values=False)
    cases = list(map(json.loads, said.splitlines()))
    assert len(cases) == 8 * 5 * 2 + 1
    assert [case for case in cases if case[1] != case[2]] == []
