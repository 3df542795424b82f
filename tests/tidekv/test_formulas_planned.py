"""Formulas against runs on a virtual card, tensor by tensor.

Blocks of expandable segments are as large as what was asked for, so nothing is left to explain:
each run holds at its peak the tensors that the formula lists, of each component and size.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from memtrace.virtual_gpu.launch import environment
from tests.virtual_gpu.vectors import TORCH
from tidekv.arguments import add_batch, add_memory, add_methods, add_model
from tidekv.formulas import peak, sizes
from tidekv.formulas.asked import case_of
from tidekv.loading import PRESETS
from tidekv.plans import planning
from tidekv.plans.cards import card_of

CARD = "a100-40g"
pytestmark = [
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no virtual GPU here"
    ),
    pytest.mark.skipif(
        TORCH != (2, 14), reason="formulas count what torch 2.14 takes: docs/plan.md has the rest"
    ),
]

#: Small models whose peaks lie in different places: a wide MLP; few KV heads, biases and one
#: weight for both ends; many heads that are normalised, and a narrow MLP.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "wide": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "heads": (8, 2)},
    "tied": {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 768,
        "heads": (8, 1),
        "tie_word_embeddings": True,
    },
    "narrow": {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 32, "heads": (8, 4)},
}
#: Kernels: FlashAttention, the memory-efficient one and PyTorch's plain operators in two dtypes,
#: ours in three.
ATTENTION = (
    "--attention fa2",
    "--attention sdpa --dtype float32",
    "--attention sdpa_efficient",
    "--attention sdpa_math",
    "--attention sdpa_math --dtype float32",
    "--attention eager",
    "--attention eager --dtype float16",
    "--attention eager --dtype float32",
)
METHODS = ("snapkv", "mst", "tidekv", "published", "chunked", "full", "online", "headinfer")
#: What else decides: chunks that divide the prompt or don't, pieces, windows, blocks, budgets up to
#: the whole prompt, prompts shorter than a chunk, several at once.
SETTINGS = (
    "--prompt 1500 --budget 0.3 --chunk-size 200 --piece-rows 64",
    "--prompt 1024 --budget 100 --chunk-size 512 --piece-rows 512 --batch 2",
    "--prompt 300 --budget 300 --chunk-size 16 --piece-rows 512",
)
SELECTORS = (
    *("pyramidkv", "adakv", "chunkkv", "cake", "tova", "h2o", "keydiff", "knorm"),
    *("streamingllm", "recent", "random"),
)
PLACED = (
    "--stream-weights",
    "--host-bridge",
    "--park-caches",
    "--host-embeddings",
    "--stream-weights --host-bridge --park-caches --host-embeddings",
)


def grid(methods: Sequence[str], rest: Sequence[str]) -> Iterator[str]:
    """Each method with each of the rest, the models and settings taking turns."""
    turn = 0
    for method in methods:
        for one in rest:
            model, setting = list(MODELS)[turn % len(MODELS)], SETTINGS[turn // 2 % len(SETTINGS)]
            yield f"{method} --model {model} {setting} {one}"
            turn += 1


CASES = (
    *grid(METHODS, ATTENTION[:1]),
    *grid(["snapkv", "tidekv", "published", "headinfer"], ATTENTION[1:]),
    *grid(["tidekv"], [f"--selector {one}" for one in SELECTORS]),
    *grid(["tidekv"], PLACED),
    *grid(["snapkv", "tidekv", "full"], ["--cache kivi"]),
    "tidekv --model wide --prompt 900 --budget 64 --chunk-size 256 --selector-option window=4",
    "tidekv --model wide --prompt 900 --budget 64 --chunk-size 16 --selector-option block_size=128",
    "tidekv --model tied --prompt 900 --budget 64 --chunk-size 900 --dtype float32",
    "tidekv --model wide --prompt 2000 --budget 800 --chunk-size 16 --cache kivi --selector recent",
    *(
        f"as-given --schedule head_offload {one}"
        for one in (
            "--model tied --prompt 1024 --budget 100 --batch 2 --selector h2o",
            "--model narrow --prompt 1500 --budget 140 --chunk-size 16 --selector h2o",
            "--model wide --prompt 2000 --budget 900 --chunk-size 16 --selector knorm",
        )
    ),
    "snapkv --model narrow --prompt 1500 --budget 300 --selector h2o",
    "as-given --model wide --prompt 3000 --selector h2o --schedule kv_offload",
    *(
        f"{one} --selector cake --selector-option window=4 --selector-option block_size=64"
        for one in (
            "tidekv --model narrow --prompt 1024 --budget 500 --chunk-size 16 --batch 2",
            "chunked --model tied --prompt 2000 --budget 700 --chunk-size 16",
            "as-given --schedule head_offload --model tied --prompt 2000 --chunk-size 16",
            "published --model narrow --prompt 900 --budget 700 --chunk-size 16 --attention fa2",
            "snapkv --model wide --prompt 900 --budget 100",
        )
    ),
    "published --model narrow --prompt 3000 --chunk-size 16 --selector h2o --attention fa2",
    "online --model tied --prompt 2000 --budget 1500 --chunk-size 16 --cache kivi --selector knorm",
    "online --model tied --prompt 900 --budget 900 --chunk-size 16 --cache kivi --selector recent",
    *(
        f"{one} --cache kivi --selector adakv --selector-option window=2"
        f" --selector-option block_size=64 --chunk-size 16"
        for one in (
            "tidekv --model tied --prompt 3000 --budget 2000",
            "chunked --model narrow --prompt 2000 --budget 2000",
            "tidekv --model wide --prompt 900 --budget 200 --batch 2 --cache-option bits=4",
        )
    ),
    "chunked --model narrow --prompt 1500 --chunk-size 16 --selector knorm --budget 64",
    "mst --model narrow --prompt 9000 --budget 64",
    "published --model narrow --prompt 300 --budget 64 --chunk-size 16",
    "as-given --model narrow --prompt 3000 --schedule kv_offload --selector none",
)


def asked(case: str, folder: Path) -> argparse.Namespace:
    """The options of ``tidekv plan``."""
    parser = argparse.ArgumentParser()
    for add in (add_model, add_methods, add_batch, add_memory):
        add(parser)
    parser.add_argument("--prompt", type=int)
    method, *words = case.split()
    arguments = parser.parse_args(words)
    if arguments.model not in PRESETS:
        arguments.model = str(folder / arguments.model)
    return arguments if method == "as-given" else planning.named(arguments, method)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with a configuration and no weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, sizes_ in MODELS.items():
        settings = dict(sizes_)
        heads, kv_heads = settings.pop("heads")
        config = {
            "num_hidden_layers": 3,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 64,
            "vocab_size": 500,
            "max_position_embeddings": 1 << 17,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            **settings,
        }
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def held(cases: Sequence[str], models: Path) -> dict[str, dict[str, Counter[int]]]:
    """What each prefill holds at its peak, by component."""
    words = []
    for case in cases:
        arguments = asked(case, models)
        words.append([*planning.options(arguments), "--prompt-tokens", str(arguments.prompt)])
    file = models / "cases.json"
    file.write_text(json.dumps(words))
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **environment([CARD])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.tidekv.peaks", file],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return {
        case: {
            component: Counter({int(size): count for size, count in one.items()})
            for component, one in json.loads(line).items()
        }
        for case, line in zip(cases, done.stdout.splitlines(), strict=True)
    }


def by_formula(case: str, models: Path) -> dict[str, Counter[int]]:
    moment = peak(case_of(asked(case, models), card_of(CARD)))
    found: dict[str, Counter[int]] = {}
    for component in {one.component for one in moment.tensors}:
        of_it = Counter(sizes(one for one in moment.tensors if one.component == component))
        if of_it:
            found[component] = of_it
    return found


@pytest.fixture(scope="module")
def runs(models: Path) -> dict[str, dict[str, Counter[int]]]:
    return held(CASES, models)


@pytest.mark.parametrize("case", CASES)
def test_a_run_holds_at_its_peak_what_the_formula_lists(
    runs: dict[str, dict[str, Counter[int]]], models: Path, case: str
) -> None:
    assert by_formula(case, models) == runs[case]


@pytest.mark.slow
def test_so_it_is_of_every_method_with_everything(models: Path) -> None:
    cases = [
        *grid(METHODS, ATTENTION),
        *grid(["snapkv", "mst", "chunked"], [f"--selector {one}" for one in SELECTORS[:4]]),
        *grid(METHODS, ["--cache kivi"]),
    ]
    found = held(cases, models)
    for case in cases:
        assert by_formula(case, models) == found[case], case


@pytest.mark.slow
@pytest.mark.parametrize("model", PRESETS)
def test_so_it_is_with_models_of_8_billion(models: Path, model: str) -> None:
    options = "--prompt 16384 --budget 4096 --chunk-size 2048"
    cases = [f"{method} --model {model} {options}" for method in METHODS]
    found = held(cases, models)
    for case in cases:
        assert by_formula(case, models) == found[case], case
