"""``tidekv plan``: dry runs beside formulas, verdicts, and cards that suffice."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from memtrace import dry_run
from memtrace.analysis.summary import summarise
from memtrace.trace.reader import open_trace
from tests.virtual_gpu.running import described
from tests.virtual_gpu.vectors import TORCH
from tidekv.plans import searches
from tidekv.plans.capacity import Probe
from tidekv.plans.cards import candidates
from tidekv.plans.curve import Curve
from tidekv.plans.curve_command import curves_answered
from tidekv.plans.planning import check_ended
from tidekv.progress import LINES

LLAMA = ("--model", "llama-3.1-8b", "--budget", "1024")
ON_CARD = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="no virtual GPU here"
)


def plan(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tidekv", "plan", *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "runs"


@pytest.fixture(scope="module")
def plans(runs: Path) -> dict[str, Any]:
    """SnapKV and TideKV at 8 K on an A100, by method."""
    told = plan(
        *(*LLAMA, "--prompt", "8192", "--device", "a100-40g", "--compare", "snapkv,tidekv"),
        *("-o", runs, "--json"),
    )
    assert told.returncode == 0, told.stderr
    return {one["method"]: one for one in json.loads(told.stdout)["plans"]}


@ON_CARD
@pytest.mark.parametrize("method", ["snapkv", "tidekv"])
def test_every_term_is_as_its_formula_says_or_the_tensor_is_named(
    plans: dict[str, Any], method: str
) -> None:
    found = plans[method]
    terms = {one["name"]: one for one in found["terms"]}
    assert found["fits"]
    for name in ("KV_res", "Hidden", "Act", "model", "backend", "other", "M_live", "allocated"):
        assert terms[name]["difference"] is not None
    for one in terms.values():
        if one["difference"] is not None:
            large = abs(one["difference"]) > 0.02 * max(one["planned"], one["formula"])
            assert bool(one["note"]) == (large and one["name"] not in ("M_live", "allocated"))
    for name in ("model", "Hidden", "other"):
        assert terms[name]["difference"] == 0
    workspace = 8_519_680 if TORCH >= (2, 15) else 0  # there for products only from then on
    assert -workspace <= terms["allocated"]["difference"] + (8 << 20) <= 16 << 20
    for name in ("external", "process"):
        assert terms[name]["planned"] is None


@ON_CARD
def test_a_plan_says_what_a_report_says_and_more(plans: dict[str, Any]) -> None:
    found = plans["tidekv"]
    assert found["knowledge"] == "virtual"
    assert found["planned"]["device"] == found["card"] == "a100-40g"
    assert "CUDA context of NVIDIA A100-SXM4-40GB" in found["planned"]["unknown"]
    assert found["reserved"]["peak"] == found["reserved_peak"] >= found["peak"]["allocated"]
    assert found["headroom"] == 42_298_834_944 - found["reserved_peak"]
    assert found["peak"]["allocated"] < plans["snapkv"]["peak"]["allocated"]


@ON_CARD
def test_without_a_build_for_cuda_the_plan_is_the_same(plans: dict[str, Any]) -> None:
    told = plan(
        *(*LLAMA, "--prompt", "8192", "--device", "a100-40g", "--engine", "fake", "--json"),
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["planned"]["engine"] == "fake"
    assert found["knowledge"] == "modelled"
    for key in ("terms", "fits", "headroom", "reserved"):
        assert found[key] == plans["tidekv"][key]


@ON_CARD
@pytest.mark.usefixtures("plans")
def test_a_planned_run_is_a_run_like_another(runs: Path) -> None:
    summary = summarise(open_trace(runs / "tidekv.memtrace"))
    assert summary.complete
    assert summary.planned is not None
    assert summary.planned.engine == "virtual"
    assert summary.accounts[0].identities.hold


@ON_CARD
@pytest.mark.usefixtures("plans")
def test_a_plan_is_the_same_with_values_followed(runs: Path, tmp_path: Path) -> None:
    planned = open_trace(runs / "tidekv.memtrace")
    command = planned.manifest["command"]
    followed = dry_run(command, device="a100-40g", out=tmp_path / "run", stdout=2)
    (one,), (two,) = planned.processes, followed.processes
    events = described(one)
    assert len(events) > 10_000
    assert events == described(two)


@ON_CARD
@pytest.mark.usefixtures("plans")
def test_cards_suffice_by_what_is_reserved_on_them(runs: Path) -> None:
    trace = open_trace(runs / "tidekv.memtrace")
    account = summarise(trace).accounts[0]
    cards = candidates(trace, account)
    assert [one.card.total for one in cards] == sorted(one.card.total for one in cards)
    assert account.reserved_peak is not None
    for one in cards:
        assert one.fits  # 16 GiB of weights, and little more
        assert one.left == one.card.total - (one.card.context or 0) - account.reserved_peak


@ON_CARD
def test_no_room_is_a_verdict() -> None:
    told = plan(
        *(*LLAMA, "--prompt", "131072", "--schedule", "whole_prompt"),
        *("--device", "rtx-4090-24g"),
    )
    assert told.returncode == 3
    assert "131,072 tokens don't fit NVIDIA GeForce RTX 4090" in told.stdout
    assert "By formula it takes 29.65 GiB." in told.stdout
    assert "Traceback" not in told.stderr


@ON_CARD
def test_so_it_is_where_the_allocator_tells_of_no_failure() -> None:
    """And where the driver's pool holds less than the card has."""
    told = plan(
        *(*LLAMA, "--prompt", "65536", "--device", "jetson-agx-orin-64g"),
        *("--schedule", "whole_prompt", "--allocator", "backend:cudaMallocAsync"),
    )
    assert told.returncode == 3, told.stderr
    assert (
        "snapkv: 65,536 tokens don't fit Orin (61.37 GiB): what was asked for isn't known under "
        "this allocator, whose pool holds 20.00 GiB at most there. By formula it takes 22."
    ) in told.stdout


@ON_CARD
def test_a_folder_without_weights_of_a_family_without_formulas_is_planned(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = plan("--model", tmp_path, "--prompt", "2000", "--device", "l4-24g")
    assert told.returncode == 0, told.stderr
    assert "No formulas are known for this: they know the families llama," in told.stdout
    assert "tidekv: 2,000 tokens fit" in told.stdout


@ON_CARD
def test_another_torch_s_allocator_is_modelled(plans: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "modelled.memtrace"
    told = plan(
        *(*LLAMA, "--prompt", "8192", "--device", "a100-40g", "--torch", "2.5", "--json"),
        *("-o", out),
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert "by the rules of torch 2.5's allocator" in found["modelled"]
    assert plans["tidekv"]["modelled"] is None
    assert (found["planned"]["device"], found["planned"]["engine"]) == ("a100-40g", "virtual")
    assert found["peak"]["allocated"] == plans["tidekv"]["peak"]["allocated"]
    assert found["reserved"]["peak"] >= found["peak"]["allocated"]
    assert "2.5" in json.dumps(open_trace(out).processes[0].manifest)


@ON_CARD
def test_peaks_of_several_lengths_are_those_of_each_alone(plans: dict[str, Any]) -> None:
    """Up to the first that doesn't fit; a program is told how far it is."""
    told = plan(
        *(*LLAMA, "--prompts", "262144,131072,8192", "--device", "a100-40g"),
        *("--schedule", "whole_prompt", "--json"),
        environment={LINES: "1"},
    )
    assert told.returncode == 3, told.stderr
    (found,) = json.loads(told.stdout)["methods"]
    assert [(one["prompt"], one["fits"]) for one in found["probes"]] == [
        (8192, True),
        (131072, True),
        (262144, False),
    ]
    alone = plans["snapkv"]
    assert found["probes"][0]["allocated_peak"] == alone["peak"]["allocated"]
    assert found["probes"][0]["reserved_peak"] == alone["reserved"]["peak"]
    lines = [json.loads(line) for line in told.stderr.splitlines() if line.startswith("{")]
    assert lines[0] == {"doing": "Trying 8,192 tokens", "done": 0, "total": 32}
    assert lines[32]["done"] == 32


def test_a_killed_plan_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(SystemExit, match="137"):
        check_ended(dry_run(killed, device="cpu", out=tmp_path / "run"))
    assert "tidekv: The planned process was killed by SIGKILL" in capsys.readouterr().err


def test_no_figure_of_many_methods_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Curve((Probe(4096, True, 1023 << 30, 1023 << 30),))
    monkeypatch.setattr(searches, "curve", lambda *_: found)
    monkeypatch.setenv("COLUMNS", "40")
    arguments = argparse.Namespace(prompts="4096", device="a100-40g", json=False, model="m")
    assert curves_answered(arguments, {f"method {n}": arguments for n in range(6)}, 1)
    assert capsys.readouterr().out.count("1023.00 GiB") == 12


@ON_CARD
@pytest.mark.slow
def test_the_longest_prompt_is_one_that_was_tried() -> None:
    told = plan(
        *(*LLAMA, "--schedule", "whole_prompt", "--device", "l4-24g", "--max-context", "--json")
    )
    assert told.returncode == 0, told.stderr
    (found,) = json.loads(told.stdout)["methods"]
    tried = {one["prompt"]: one["fits"] for one in found["probes"]}
    assert tried[found["prompt"]]
    assert not tried[found["shorter_than"]]
    alone = plan(
        *(*LLAMA, "--schedule", "whole_prompt", "--device", "l4-24g"),
        *("--prompt", str(found["prompt"]), "--json"),
    )
    reserved = {one["prompt"]: one["reserved_peak"] for one in found["probes"]}
    assert json.loads(alone.stdout)["reserved"]["peak"] == reserved[found["prompt"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "4096"], "--device is missing"),
        (["--device", "a100-40g"], "either --prompt N, --prompts N,N,… or --max-context"),
        (["--prompts", "many"], "--prompts 'many' is no list of lengths"),
        (["--prompts", "9", "--prompt", "9"], "--prompts keeps no run and goes with none but"),
        (["--prompt", "0", "--device", "a100-40g"], "--prompt must be at least 1"),
        (["--prompt", "9", "--device", "nothing-like-it"], "no card 'nothing-like-it'"),
        (["--prompt", "16777217", "--device", "a100-40g"], "at most 16,777,216, not 16,777,217"),
        (["--prompts", "9,16777217"], "is no list of lengths"),
        (["--prompt", "9", "--device", "a100-40g", "--compare", "mine"], "no method 'mine'"),
        (["--prompt", "9", "--device", "a100-40g", "--compare", ""], "no method ''"),
        (
            ["--prompt", "9", "--device", "a100-40g", "--compare", "tidekv", "-o", __file__],
            "can't be made: File exists",
        ),
        (["--prompt", "9", "--device", "a100-40g", "--allocator", "a:1"], "'a' is no setting"),
        (["--prompt", "9", "--device", "a100-40g", "-o", "/"], "/ is there already"),
        (["--max-context", "--device", "a100-40g", "-o", "x"], "--max-context keeps no run"),
        (["--prompt", "9", "--device", "a100-40g", "--fit", "-o", "x"], "--fit keeps no run"),
        (
            ["--prompt", "9", "--device", "a100-40g", "--fit", "--schedule", "chunked"],
            "what layer_major alone has",
        ),
        (["--prompt", "9", "--device", "a100-40g", "--torch", "9.9"], "the newest is 2.15"),
        (["--prompt", "9", "--device", "a100-40g", "--torch", "1.9"], "the oldest is 2.1"),
        (["--prompt", "9", "--device", "a100-40g", "--torch", "new"], "not a version of torch"),
        (["--max-context", "--device", "a100-40g", "--torch", "2.9"], "--torch goes with"),
        (["--prompt", "9", "--device", "a100-40g", "--chunk-size", "0"], "--chunk-size must be"),
        (
            ["--prompt", "9", "--device", "a100-40g", "--budget", "10"],
            "is outside 1..9, the prompt",
        ),
        (["--max-context", "--device", "a100-40g", "--budget", "1.5"], "is no share of the prompt"),
        (["--prompts", "9", "--attention", "mine"], "no attention 'mine'; use one of sdpa, eager"),
        (["--prompt", "9", "--min-device", "--selector", "mine"], "no selector 'mine'; use one of"),
        (
            ["--prompt", "9", "--device", "cpu", "--model", "a/b/c"],
            "configuration of 'a/b/c' can't",
        ),
    ],
)
def test_bad_input_gets_a_sentence(arguments: list[str], sentence: str) -> None:
    told = plan(*LLAMA[:2], *arguments)
    assert told.returncode == 2
    assert told.stderr.startswith("tidekv: ")
    assert told.stderr.count("tidekv: ") == 1
    assert sentence in told.stderr
    assert "Traceback" not in told.stderr
