"""Workloads: files, generators, and serving them in one process."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv import workloads
from tidekv.cli import main
from tidekv.errors import TidekvError
from tidekv.workloads import Request

KINDS = ("mixed", *workloads.GENERATORS)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), requests=st.integers(1, 60))
def test_a_workload_is_the_same_for_a_seed(kind: str, seed: int, requests: int) -> None:
    def make() -> list[Request]:
        return workloads.make(
            kind, shortest=100, longest=3000, requests=requests, new_tokens=3, seed=seed
        )

    made = make()
    assert made == make()
    assert len({request.id for request in made}) == requests
    assert all(100 <= (request.prompt_tokens or 0) <= 3000 for request in made)
    assert [one.arrival for one in made] == sorted(one.arrival for one in made)


def test_every_cycle_holds_the_same_requests() -> None:
    made = workloads.make("mixed", shortest=1, longest=8, requests=12, new_tokens=1)
    cycles = [[one.prompt_tokens for one in made if one.cycle == cycle] for cycle in range(3)]
    assert [sorted(cycle, key=int) for cycle in cycles] == [[1, 2, 4, 8]] * 3
    assert len({tuple(cycle) for cycle in cycles}) > 1  # in another order


def test_the_mixes_differ_as_their_names_say() -> None:
    lengths = {
        kind: [
            request.prompt_tokens or 0
            for request in workloads.make(
                kind, shortest=1024, longest=131072, requests=2000, new_tokens=1
            )
        ]
        for kind in KINDS
    }
    shortest = {kind: found.count(1024) / 2000 for kind, found in lengths.items()}
    assert shortest["zipf"] > 1.5 / 8 > shortest["mixed"]
    tail = sorted(lengths["long-tail"])
    assert tail[1000] < 3000 < 100_000 < tail[-1]
    runs = sum(a != b for a, b in zip(lengths["bursty"], lengths["bursty"][1:], strict=False))
    assert runs < 2000 / 4


@given(
    st.lists(
        st.builds(
            Request,
            st.text(min_size=1),
            st.integers(1, 1 << 30),
            st.integers(0, 100),
            st.floats(0, 1e6),
            st.none(),
            st.none() | st.integers(0, 9),
        ),
        min_size=1,
        unique_by=lambda request: request.id,
    )
)
def test_files_keep_requests(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    workloads.save(requests, path)
    assert workloads.load(path) == requests


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{", "line 1: this is not JSON"),
        ("[]", "a JSON object"),
        ('{"id": "a", "new_tokens": 1}', "either prompt_tokens or prompt"),
        ('{"id": "a", "prompt": "x", "prompt_tokens": 3}', "either prompt_tokens or prompt"),
        ('{"prompt_tokens": 3}', "an id"),
        ('{"id": "\\ud800", "prompt_tokens": 3}', "an id"),
        ('{"id": "a", "prompt": "\\ud800"}', "prompt is a text"),
        ('{"id": "a", "prompt_tokens": 0}', "prompt_tokens is a whole number, 1 or more"),
        ('{"id": "a", "prompt_tokens": true}', "prompt_tokens is a whole number"),
        ('{"id": "a", "prompt_tokens": 5, "new_tokens": -1}', "new_tokens is a whole number"),
        ('{"id": "a", "prompt_tokens": 5, "arrival": "x"}', "arrival is a number"),
        ('{"id": "a", "prompt_tokens": 5, "arrival": NaN}', "arrival is a number"),
        ('{"id": "a", "prompt_tokens": 5, "colour": 1}', "no colour"),
        ('{"id": "a", "prompt_tokens": 5}\n{"id": "a", "prompt_tokens": 5}', "line 2: the id 'a'"),
    ],
)
def test_what_is_no_workload_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "w.jsonl").write_text(text)
    with pytest.raises(TidekvError) as refused:
        workloads.load(tmp_path / "w.jsonl")
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["mixed-150.jsonl", "mixed-150-cpu.jsonl"])
def test_ours_are_150_requests_of_six_lengths_or_more(name: str) -> None:
    found = workloads.load(Path(__file__).parents[2] / "traces" / name)
    assert len(found) == 150
    assert len(Counter(request.prompt_tokens for request in found)) >= 6


# -- the commands --------------------------------------------------------------------------------


def test_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl"
    argv = [
        "workload",
        "make",
        "mixed",
        "--lengths",
        "20",
        "30",
        "--requests",
        "4",
        "-o",
        str(path),
    ]
    assert main(argv) == 0
    assert "4 requests, 100 prompt tokens" in capsys.readouterr().out
    assert main(argv) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nonsense"], "no workload 'nonsense'"),
        (["mixed", "--requests", "0"], "one request or more"),
        (["zipf", "--lengths", "3"], "of a mixed workload"),
        (["zipf", "--shortest", "9", "--longest", "8"], "9 to 8 tokens"),
    ],
)
def test_bad_workloads(
    tmp_path: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["workload", "make", *argv, "-o", str(tmp_path / "w")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Any:
    """Every model is this one."""
    model = tiny("llama")
    monkeypatch.setattr("tidekv.serving.load_model", lambda *_, **__: (model, None))
    return model


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_requests_are_no_workload(
    tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workloads.save([Request("a", 20, 2)], tmp_path / "w.jsonl")
    assert main(["serve-trace", str(tmp_path / "w.jsonl"), "--requests", number]) == 2
    assert f"--requests must be at least 1, not {number}." in capsys.readouterr().err


def test_a_request_that_fails_is_told_and_the_next_goes_on(
    tmp_path: Path,
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from tidekv import serving

    real = serving.prefill

    def prefill(model: Any, ids: Any, **more: Any) -> Any:
        if ids.shape[1] == 30:
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB. Too much.")
        return real(model, ids, **more)

    monkeypatch.setattr(serving, "prefill", prefill)
    workloads.save(
        [
            Request("a", 20, 2),
            Request("b", 30, 2),
            Request("c", None, 2, prompt="hi"),
            Request("d", 40, 0),
        ],
        tmp_path / "w.jsonl",
    )
    argv = ["serve-trace", str(tmp_path / "w.jsonl"), "--budget", "16", "--json"]
    argv += ["--selector-option", "window=4", "--selector-option", "sinks=1"]
    assert main(argv) == 2
    said = capsys.readouterr()
    found = {one["id"]: one for one in map(json.loads, said.out.splitlines())}
    assert [one["outcome"] for one in found.values()] == ["ok", "oom", "error", "ok"]
    assert found["a"]["new_tokens"] == 2
    assert found["a"]["first_token_s"] > 0
    assert "Tried to allocate 1 GiB" in found["b"]["error"]
    assert "without a tokenizer" in found["c"]["error"]
    assert "2 of 4 requests failed" in said.err
