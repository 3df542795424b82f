"""A plan for the CPU equals a real run of the same command, byte for byte."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from memtrace import dry_run
from memtrace.analysis.summary import AccountSummary, summarise
from memtrace.errors import MemtraceError
from memtrace.trace.reader import open_trace
from tidekv.errors import LoadError
from tidekv.loading import smollm2_folder

TINY = """
import sys
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=1024, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
)).save_pretrained(sys.argv[1])
words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(sys.argv[1])
"""


def on_cpu(run: Path) -> tuple[AccountSummary, Counter[int]]:
    """The account of the CPU, and how many storages of more than 4 bytes of each size."""
    [one] = [one for one in summarise(open_trace(run)).accounts if one.device == "cpu"]
    process = one.account.process
    mine = process.contexts_on("cpu")[process.events["context"]]
    sizes = Counter(process.events["requested"][mine].tolist())
    # torch._dynamo makes single numbers while it is imported, as of torch 2.8; a plan imports it
    # before it records.
    return one, Counter({size: times for size, times in sizes.items() if size > 4})


def recorded(run: Path, command: list[str]) -> None:
    memtrace = [sys.executable, "-m", "memtrace", "record", "--source", "tensors", "-o", str(run)]
    subprocess.run([*memtrace, "--", sys.executable, *command], check=True, capture_output=True)


def check_equal(folder: Path, model: str, tokens: str, budget: str) -> None:
    same = ["--model", model, "--budget", budget]
    command = ["-m", "tidekv", "run", *same, "--prompt-tokens", tokens, "--max-new-tokens", "0"]
    recorded(folder / "real.memtrace", [*command, "--device", "cpu", "--json"])
    plan = ["-m", "tidekv", "plan", *same, "--prompt", tokens, "--device", "cpu", "--json"]
    out = ["-o", str(folder / "planned.memtrace")]
    told = subprocess.run([sys.executable, *plan, *out], capture_output=True, text=True, check=True)
    body = json.loads(told.stdout)
    assert body["fits"] is None  # nobody knows what memory there is
    assert body["card"] == "cpu"
    (real, sizes), (planned, planned_sizes) = (
        on_cpu(folder / name) for name in ("real.memtrace", "planned.memtrace")
    )
    assert planned.peak.components == real.peak.components
    assert planned.peak.details == real.peak.details
    assert planned.peak.allocated == real.peak.allocated
    assert planned_sizes == sizes
    assert planned.peak.process is None  # its large tensors take no memory


def test_a_small_model_takes_what_it_takes_in_a_real_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", TINY, str(model)], check=True)
    check_equal(tmp_path, str(model), "3000", "200")


@pytest.mark.slow
def test_smollm2_takes_what_it_takes_in_a_real_run(tmp_path: Path) -> None:
    try:
        smollm2_folder()
    except LoadError as error:
        pytest.skip(str(error))
    check_equal(tmp_path, "smollm2", "2000", "256")


def test_a_cpu_has_no_settings_of_an_allocator(tmp_path: Path) -> None:
    with pytest.raises(MemtraceError, match="has no allocator settings"):
        dry_run(
            [sys.executable, "-c", ""],
            device="cpu",
            out=tmp_path / "run",
            allocator="expandable_segments:True",
        )
