"""The command ``tidekv``. Nothing here imports torch before a sub-command runs."""

import argparse
import atexit
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tidekv.arguments import (
    add_batch,
    add_device,
    add_memory,
    add_methods,
    add_model,
    add_untrained,
    budget,
    flag_of,
)
from tidekv.errors import TidekvError
from tidekv.garbage import none_to_collect
from tidekv.plans.command import add_plan
from tidekv.tables.command import add_tables

#: Raised when a key of ``run --json`` changes its meaning or goes away.
JSON_SCHEMA = 2

_EPILOG = """\
examples:
  tidekv run --model smollm2 --prompt-file traces/demo-prompt.txt
  tidekv plan --model llama-3.1-8b --prompt 65536 --budget 4096 --device a100-40g
  tidekv tables --only accounting
  tidekv serve-trace traces/mixed-150-cpu.jsonl
  tidekv methods
  tidekv fidelity --dtype bfloat16
  tidekv fetch smollm2

exit status: 0 done, 1 a file or the disk fails, 2 bad input, 3 out of memory, 130 interrupted; plan
has its own.
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

exit status: 0 done, 1 a file or the disk fails, 2 bad input, 3 out of memory, 130 interrupted.
"""


_SERVE_EPILOG = """\
examples:
  memtrace record -o served.memtrace -- tidekv serve-trace traces/mixed-150-cpu.jsonl
  memtrace record --virtual-gpu a100-40g -o served.memtrace -- tidekv serve-trace \\
      traces/mixed-150.jsonl --model llama-3.1-8b --device cuda --budget 4096

A line a request; --json: schema, id, prompt_tokens, new_tokens, outcome (ok, oom or error),
seconds, first_token_s, tokens_per_s, error (null where there is none). A request that fails is told
of, and the next one goes on.

exit status: 0 all answered, 1 a file or the disk fails, 2 bad input or a request failed,
3 no memory for the model, 130 interrupted.
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


def command() -> NoReturn:
    """The command ``tidekv``, as a process of its own: as :func:`main`, and ends it."""
    status = main()
    if "torch" in sys.modules:
        # To take torch and transformers apart takes a quarter of a second, and nobody needs it.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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
        typed = flag_of(name)
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
    add_model(run)
    add_untrained(run)
    prompt = run.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 text")
    prompt.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="N random tokens, for measuring"
    )
    add_methods(run)
    add_device(run)
    run.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="0: read the prompt only (default: %(default)s)",
    )
    run.add_argument("--json", action="store_true", help="print one JSON object instead")

    add_batch(run)
    add_memory(run)

    add_plan(commands)
    _add_workloads(commands)
    add_tables(commands)

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
        "--budget", type=budget, default=1024, help="as of run (default: %(default)s)"
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


def _add_workloads(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve-trace",
        help="answer a workload in one process",
        description="Answer the requests of a workload one after the other, in one process.",
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(command=_serve, piece_rows=None, stream_weights=None)
    serve.set_defaults(host_bridge=None, park_caches=None, host_embeddings=None)
    serve.add_argument("workload", type=Path, metavar="WORKLOAD", help="a .jsonl file")
    add_model(serve)
    add_methods(serve)
    add_device(serve)
    serve.add_argument("--requests", type=int, metavar="N", help="the first N only")
    serve.add_argument("--json", action="store_true", help="print one JSON object a request")

    workload = commands.add_parser("workload", help="make a workload")
    kinds = workload.add_subparsers(required=True, metavar="COMMAND")
    make = kinds.add_parser(
        "make",
        help="make a workload",
        description="Make a list of requests of many lengths, the same for the same seed.",
        epilog="example:\n  tidekv workload make mixed --lengths 1024 8192 65536 -o mix.jsonl\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.set_defaults(command=_workload)
    make.add_argument(
        "kind",
        help="mixed (cycles over the lengths), zipf (mostly short), long-tail (a few very long) or "
        "bursty (runs of one length)",
    )
    make.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prompt tokens, of mixed")
    make.add_argument(
        "--shortest", type=int, default=1024, metavar="N", help="default: %(default)s"
    )
    make.add_argument(
        "--longest", type=int, default=131072, metavar="N", help="default: %(default)s"
    )
    make.add_argument("--requests", type=int, default=150, metavar="N", help="default: %(default)s")
    make.add_argument("--new-tokens", type=int, default=8, metavar="N", help="default: %(default)s")
    make.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    make.add_argument("-o", "--output", type=Path, metavar="FILE", required=True)


def _run(arguments: argparse.Namespace) -> None:
    with none_to_collect():
        from tidekv import running

    outcome = running.run(arguments, stream=not arguments.json)
    if arguments.json:
        print(json.dumps({"schema": JSON_SCHEMA, **outcome.as_json()}))
    else:
        print(outcome.summary())


def _serve(arguments: argparse.Namespace) -> None:
    from tidekv import serving, workloads
    from tidekv.progress import progress_bar

    workloads.check_requests(arguments.requests)
    requests = workloads.load(arguments.workload)[: arguments.requests]
    failed = 0
    with progress_bar("Requests", total=len(requests)) as done:
        for served in serving.serve(arguments, requests):
            failed += served.outcome != "ok"
            print(
                json.dumps({"schema": JSON_SCHEMA, **served.as_json()})
                if arguments.json
                else served.summary(),
                flush=True,
            )
            done()
    if failed:
        raise TidekvError(f"{failed} of {len(requests)} requests failed.")


def _workload(arguments: argparse.Namespace) -> None:
    from tidekv import workloads

    if arguments.output.exists():
        raise TidekvError(f"{arguments.output} is there already; remove it or name another file.")
    made = workloads.make(
        arguments.kind,
        shortest=arguments.shortest,
        longest=arguments.longest,
        requests=arguments.requests,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
        lengths=arguments.lengths,
    )
    workloads.save(made, arguments.output)
    tokens = sum(request.prompt_tokens or 0 for request in made)
    print(f"{arguments.output}: {len(made)} requests, {tokens:,} prompt tokens")


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
