"""The command ``tidekv``. Nothing here imports torch before a sub-command runs."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tidekv.errors import TidekvError

#: Raised when a key of ``run --json`` changes its meaning or goes away.
JSON_SCHEMA = 2

_EPILOG = """\
examples:
  tidekv run --model smollm2 --prompt-file traces/demo-prompt.txt
  tidekv methods
  tidekv fidelity --dtype bfloat16
  tidekv fetch smollm2

exit status: 0 done, 1 out of memory or disk, 2 bad input, 130 interrupted.
"""

_RUN_EPILOG = """\
examples:
  tidekv run --model smollm2 --prompt-file traces/demo-prompt.txt
  tidekv run --model ./my-llama --prompt-file long.txt --schedule whole_prompt --budget 0.1
  tidekv run --prompt-file long.txt --selector-option window=64 --cache kivi --cache-option bits=4
  tidekv run --model llama-3.1-8b --prompt-tokens 65536 --device cuda --stream-weights \\
      --host-bridge --park-caches --host-embeddings --max-new-tokens 0 --json

run --json prints one object: schema, model, dtype, device, schedule, schedule_parameters, selector,
selector_parameters, cache, cache_parameters, attention (as asked for), attention_kernel (that
served), scoring, chunk_size (null without chunks), prompt_tokens, generated_tokens, rows_kept (per
layer and KV head), cache_bytes (before decoding), prefill_s, time_to_first_token_s (null where none
was generated), decode_tokens_per_s (null below two tokens), text (null without a tokenizer).

exit status: 0 done, 1 out of memory or disk, 2 bad input, 130 interrupted.
"""


_FIDELITY = """\
Compare each way to read a prompt with one forward over it: hidden states (the
last layer's output after the final norm) and next-token distributions (the
model's head on them), at every position of the prompt.

  relative L2  ‖H - H*‖ / ‖H*‖ over all positions, H* of one forward
  cosine       of the hidden states of a position, mean over positions
  top-1        share of positions with the same most likely next token
  JS           Jensen–Shannon divergence in nats (natural logarithm, at most
               ln 2 = 0.69), mean over positions
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit status is documented in ``--help``."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
        print(end="", flush=True)
    except TidekvError as error:
        print(f"tidekv: {_as_typed(str(error), arguments)}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        # The interpreter writes what is left at its end; it must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader went away, as `head` does
            print(f"tidekv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _as_typed(message: str, arguments: argparse.Namespace) -> str:
    """A sentence with parameters as the command line has them: selector=None → --selector none."""

    def flag(parameter: re.Match[str]) -> str:
        name, value = parameter["name"], parameter["value"]
        if name not in arguments:
            return parameter[0]
        typed = f"--{name.replace('_', '-')}"
        return typed if value == "True" else f"{typed} {value.lower()}"

    return re.sub(r"\b(?P<name>\w+)=(?P<quote>'?)(?P<value>\w+)(?P=quote)", flag, message)


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
        epilog=_RUN_EPILOG,
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
        "--cache", default="full_precision", help="or kivi: 2 bits (default: %(default)s)"
    )
    run.add_argument(
        "--budget",
        type=_budget,
        help="rows kept per layer and KV head, or a share such as 0.25 (default: 1024, or the "
        "whole prompt where it is shorter)",
    )
    run.add_argument(
        "--chunk-size", type=int, metavar="N", help="rows, for schedules with chunks (default: 512)"
    )
    run.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="0: read the prompt only (default: %(default)s)",
    )
    for what in ("schedule", "selector", "cache"):
        run.add_argument(
            f"--{what}-option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"a parameter of the {what}, see tidekv methods; can be repeated",
        )
    run.add_argument(
        "--scoring", default="blockwise", help="blockwise or dense (default: %(default)s)"
    )
    run.add_argument(
        "--attention",
        default="sdpa",
        help="sdpa, eager or flash_attention_2 (default: %(default)s)",
    )
    run.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)")
    run.add_argument("--device", default="cpu", help="default: %(default)s")
    run.add_argument("--json", action="store_true", help="print one JSON object instead")

    memory = run.add_argument_group("less memory during the prefill, with layer_major")
    memory.add_argument(
        "--piece-rows",
        type=int,
        metavar="N",
        help="rows of a chunk that norms, projections and the MLP take at a time (default: 512; "
        "other schedules with chunks have it too)",
    )
    for flag, text in (
        ("--stream-weights", "the model is on the host; each layer visits the device once"),
        ("--host-bridge", "hidden states are on the host, but for two chunks"),
        ("--park-caches", "finished layers' caches are on the host until decoding"),
        ("--host-embeddings", "embeddings and head are on the host; the head visits at the end"),
    ):
        memory.add_argument(flag, action="store_true", default=None, help=text)

    fetch = commands.add_parser(
        "fetch",
        help="convert the bundled model now",
        description="Convert a bundled model into the user's cache, once, and print its folder.",
    )
    fetch.set_defaults(command=_fetch)
    fetch.add_argument("model", choices=["smollm2"])

    methods = commands.add_parser(
        "methods",
        help="list schedules, selectors and caches",
        description="What there is, what goes together, and why the rest doesn't.",
    )
    methods.set_defaults(command=_methods)
    methods.add_argument("--json", action="store_true", help="as one JSON object")

    fidelity = commands.add_parser(
        "fidelity",
        help="compare schedules with one forward",
        description=_FIDELITY,
        epilog="example:\n  tidekv fidelity --prompt-tokens 2048 --dtype bfloat16\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fidelity.set_defaults(command=_fidelity)
    fidelity.add_argument("--model", default="smollm2", help="as of run (default: %(default)s)")
    fidelity.add_argument(
        "--prompt-file",
        type=Path,
        default=Path("traces/demo-prompt.txt"),
        metavar="FILE",
        help="UTF-8 text (default: %(default)s)",
    )
    fidelity.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="of it, no more than these (default: all)"
    )
    fidelity.add_argument("--chunk-size", type=int, default=512, help="default: %(default)s")
    fidelity.add_argument(
        "--budget", type=_budget, default=1024, help="as of run (default: %(default)s)"
    )
    fidelity.add_argument(
        "--selector",
        default="snapkv",
        help="of TideKV and of Block-… (default: %(default)s)",
    )
    fidelity.add_argument("--dtype", help="as of run")
    fidelity.add_argument("--device", default="cpu", help="default: %(default)s")
    fidelity.add_argument("--json", action="store_true", help="print one JSON object instead")
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


def _fidelity(arguments: argparse.Namespace) -> None:
    from tidekv import fidelity

    report = fidelity.run(arguments)
    if arguments.json:
        print(json.dumps({"schema": JSON_SCHEMA, **report.as_json()}))
    else:
        print(report.table())


def _methods(arguments: argparse.Namespace) -> None:
    from tidekv import methods

    if arguments.json:
        print(json.dumps({"schema": JSON_SCHEMA, **methods.as_json()}))
    else:
        print(methods.as_text())
