"""Check on a real GPU what the tests check on a virtual one, and compare the two.

    python benchmarks/gpu_check.py [-o RESULT.json] [--stand-in CARD]

1. The tests of the CUDA source, with the machine's own GPU in place of the virtual one.
2. The same recorded programs on the real card and on a virtual one of its figures: what the
   allocator counted at each boundary, and the components at the peak.
3. What recording costs there (benchmarks/overhead.py).
4. The context: what NVML reports of a process beside what its allocator reserved.

Takes less than five minutes; one JSON document tells everything. ``--stand-in a100-40g`` runs it
without a GPU, the virtual card in the real one's place, to check the check.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memtrace.virtual_gpu.launch import environment

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "virtual_gpu" / "scripts"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

#: Programs that both cards run: script, options, variables.
PROGRAMS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "llama, sdpa": ("recorded_llama.py", [], {}),
    "llama, eager": ("recorded_llama.py", ["--attention", "eager"], {}),
    "llama, expandable": ("recorded_llama.py", [], EXPANDABLE),
}
#: Tests that hold on any card.
TESTS = ["tests/virtual_gpu/test_cuda_source.py"]

PROPERTIES = """
import json, torch
found = torch.cuda.get_device_properties(0)
torch.empty(1, device="cuda")
free, total = torch.cuda.mem_get_info()
print(json.dumps({
    "name": found.name, "total": total, "torch": torch.__version__,
    "capability": f"{found.major}.{found.minor}", "processors": found.multi_processor_count,
    "l2_cache": found.L2_cache_size,
    "used_by_context": total - free - torch.cuda.memory_reserved(),
}))
"""


def run(script: list[str], variables: dict[str, str]) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, *script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(script)} failed:\n{done.stderr}")
    return done.stdout


def card_like(device: dict[str, Any], folder: Path) -> str:
    """A card of the catalogue with this name and memory, or one made of the figures read here."""
    from memtrace.devices import catalogue

    for name, card in catalogue().items():
        if card.name == device["name"] and abs(card.total - device["total"]) < 1 << 30:
            return name
    figures = {
        "name": device["name"],
        "total": device["total"],
        "capability": device["capability"],
        "processors": device["processors"],
        "l2_cache": device["l2_cache"],
    }
    home = folder / "memtrace"
    home.mkdir()
    lines = [f"{key} = {json.dumps(value)}" for key, value in figures.items()]
    (home / "devices.toml").write_text("\n".join(["[here]", *lines, ""]))
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    return "here"


def recorded(name: str, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """What the allocator counted at each boundary of a program, and the peak by component."""
    script, options, extra = PROGRAMS[name]
    trace = folder / "run"
    counted = run([str(SCRIPTS / script), str(trace), *options], {**variables, **extra})
    boundaries = json.loads(counted.splitlines()[-1])
    report = json.loads(run(["-m", "memtrace", "report", str(trace), "--json"], {}))
    return {
        "counted": [counted for _, counted in boundaries],
        "events": report["events"],
        "identities": report["identities"],
        "peak": report["peak"],
    }


def compare(real: dict[str, Any], virtual: dict[str, Any]) -> dict[str, Any]:
    """Where the virtual card differs from the real one, in bytes more."""
    differences = [
        {name: there[name] - here[name] for name in here}
        for here, there in zip(real["counted"], virtual["counted"], strict=True)
    ]
    components = {
        name: virtual["peak"]["components"][name] - size
        for name, size in real["peak"]["components"].items()
    }
    equal = not any(any(one.values()) for one in (*differences, components))
    return {"equal": equal, "boundaries": differences, "components_at_peak": components}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="also write the result here")
    parser.add_argument("--stand-in", metavar="CARD", help="a virtual card in the real one's place")
    args = parser.parse_args()
    start = time.monotonic()
    here = environment([args.stand_in]) if args.stand_in else {}
    device = json.loads(run(["-c", PROPERTIES], here))
    result: dict[str, Any] = {"schema": 1, "stand_in": args.stand_in, "device": device}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        card = args.stand_in or card_like(device, folder)
        there = environment([card])
        result["card"] = card
        result["programs"] = {}
        for program in PROGRAMS:
            sides = []
            for kind, variables in (("real", here), ("virtual", there)):
                place = folder / f"{len(result['programs'])}-{kind}"
                place.mkdir()
                sides.append(recorded(program, place, variables))
                print(f"{program}, {kind}: {sides[-1]['counted'][-1]}", file=sys.stderr)
            real, virtual = sides
            difference = compare(real, virtual)
            result["programs"][program] = {
                "real": real,
                "virtual": virtual,
                "difference": difference,
            }
        tests = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *TESTS],
            cwd=ROOT,
            env={**os.environ, "MEMTRACE_TEST_ON": "virtual" if args.stand_in else "real"},
            capture_output=True,
            text=True,
        )
        lines = tests.stdout.splitlines()
        result["tests"] = {"passed": tests.returncode == 0, "summary": lines[-1] if lines else ""}
        if tests.returncode:
            print(tests.stdout, file=sys.stderr)
        costs = subprocess.run(
            [sys.executable, "benchmarks/overhead.py", "--runs", "3", "--only", "cuda", "--json"],
            cwd=ROOT,
            env={**os.environ, **here},
            stdout=subprocess.PIPE,
            text=True,
        )
        result["overhead"] = json.loads(costs.stdout)
    result["seconds"] = round(time.monotonic() - start, 1)
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    good = result["tests"]["passed"] and all(
        one["difference"]["equal"] and one["real"]["identities"]["hold"]
        for one in result["programs"].values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
