"""What a process on virtual GPUs does right after it has imported torch."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from memtrace.record.imports import when_imported
from memtrace.virtual_gpu import SAID, UNFOLLOWED, VARIABLE


def enter(torch: ModuleType) -> None:
    """Check that torch sees the virtual GPUs, say so, and switch off or refuse what they can't do.

    Raises:
        SystemExit: this torch can't use them; the message says why.
    """
    _check(torch)
    entries = os.environ[VARIABLE].split(";")[1:]
    say("virtual", [entry.partition("|")[0] for entry in entries])
    without_compilers(torch)
    from memtrace.virtual_gpu import values  # it needs torch, and no other process needs it

    values.start(follow=not os.environ.get(UNFOLLOWED))


def without_compilers(torch: ModuleType) -> None:
    """Switch off or refuse what neither virtual nor fake GPUs can do."""
    # cuDNN asks the driver for more than the stand-ins have. Without it, convolutions take
    # PyTorch's own path, and attention one of the other kernels, as where cuDNN isn't installed.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    when_imported("torch.distributed.distributed_c10d", _refuse_nccl)
    when_imported("torch.utils._triton", _hide_triton)
    when_imported("torch._inductor.scheduler", _refuse_inductor)
    when_imported("triton.runtime.jit", _refuse_triton)
    when_imported("transformers.generation.utils", _run_uncompiled)


def _check(torch: ModuleType) -> None:
    if torch.version.cuda is None:
        sys.exit(
            f"memtrace: torch {torch.__version__} of {sys.executable} is not built for CUDA, which "
            "the virtual GPU needs; install the ordinary Linux wheel (pip install torch)"
        )
    made_for = os.environ[VARIABLE].partition(";")[0].partition("|")[2]
    if torch.__version__ != made_for:
        sys.exit(
            f"memtrace: the virtual GPU was made for torch {made_for}, and {sys.executable} has "
            f"{torch.__version__}; name that Python as the command to record"
        )


def say(kind: str, names: Sequence[str]) -> None:
    """That GPUs of these names are virtual or fake, once in a tree of processes."""
    if SAID in os.environ:
        return
    os.environ[SAID] = "1"
    counted = {name: names.count(name) for name in names}
    cards = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in counted.items())
    print(f"memtrace: {kind} GPU {cards}: nothing is computed, times mean nothing", file=sys.stderr)


def refusing(sentence: str) -> Any:
    """What takes the place of a function that virtual and fake GPUs can't have.

    Its calls raise a RuntimeError of this sentence.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(sentence)

    return refuse


def _run_uncompiled(utils: ModuleType) -> None:
    """``generate()`` compiles a model with a static cache by itself, but on a card only."""
    mixin = utils.GenerationMixin
    if hasattr(mixin, "_valid_auto_compile_criteria"):
        mixin._valid_auto_compile_criteria = lambda *_, **__: False


def _refuse_nccl(distributed: ModuleType) -> None:
    refuse = refusing("the virtual GPU has no NCCL; use the backend gloo")
    for name in vars(distributed):
        if name.startswith("ProcessGroupNCCL"):
            getattr(distributed, name).__init__ = refuse


def _hide_triton(triton: Any) -> None:
    """So that what torch.compile generates for the CPU is as on a machine without a GPU."""
    triton.has_triton = lambda *_, **__: False


def _refuse_triton(jit: ModuleType) -> None:
    jit.JITFunction.run = refusing(
        "the virtual GPU can't run Triton kernels; use PyTorch's own kernels"
    )


def _refuse_inductor(scheduler: ModuleType) -> None:
    create = scheduler.Scheduler.create_backend
    refuse = refusing(
        "the virtual GPU can't run what torch.compile generates with Triton; run the model without "
        "torch.compile, or with backend='eager'"
    )

    def create_backend(self: object, device: Any) -> object:
        return refuse() if device.type == "cuda" else create(self, device)

    scheduler.Scheduler.create_backend = create_backend
