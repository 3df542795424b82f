"""Options that several sub-commands of ``tidekv`` have; nothing here imports torch."""

import argparse

#: The longest prompt in tokens, and the most prompts at once: a hundred times what any model reads.
MOST = 1 << 24

#: What has parts of a prefill elsewhere than on the device, by its name in the parsed arguments.
PLACEMENT = {
    "stream_weights": "the model is on the host; each layer visits the device once",
    "host_bridge": "hidden states are on the host, but for two chunks",
    "park_caches": "finished layers' caches are on the host until decoding",
    "host_embeddings": "embeddings and head are on the host; the head visits at the end",
}


def flag_of(name: str) -> str:
    """``chunk_size`` → ``--chunk-size``"""
    return f"--{name.replace('_', '-')}"


def add_model(run: argparse.ArgumentParser) -> None:
    """Which model."""
    run.add_argument(
        "--model",
        default="smollm2",
        help="smollm2, llama-3.1-8b, mistral-7b-v0.2 (the last two without trained weights), "
        "a folder or a hub id (default: %(default)s)",
    )


def add_methods(run: argparse.ArgumentParser) -> None:
    """How a prompt is read, and by what."""
    run.add_argument("--schedule", default="layer_major", help="default: %(default)s")
    run.add_argument("--selector", default="snapkv", help="or none (default: %(default)s)")
    run.add_argument(
        "--cache", default="full_precision", help="or kivi: 2 bits (default: %(default)s)"
    )
    run.add_argument(
        "--budget",
        type=budget,
        help="rows kept per layer and KV head, or a share such as 0.25 (default: 1024, or the "
        "whole prompt where it is shorter)",
    )
    run.add_argument(
        "--chunk-size", type=int, metavar="N", help="rows, for schedules with chunks (default: 512)"
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
        type=lambda name: "flash_attention_2" if name == "fa2" else name,
        default="sdpa",
        help="sdpa, eager or flash_attention_2, short fa2; or one kernel of sdpa: sdpa_flash, "
        "sdpa_efficient or sdpa_math (default: %(default)s)",
    )
    run.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's own)")


def add_device(run: argparse.ArgumentParser) -> None:
    """Where it is read."""
    run.add_argument("--device", default="cpu", help="default: %(default)s")


def add_untrained(run: argparse.ArgumentParser) -> None:
    """Whether weights matter."""
    run.add_argument(
        "--untrained",
        action="store_true",
        help="take memory for the weights and don't read them: the answer means nothing",
    )


def add_batch(run: argparse.ArgumentParser) -> None:
    """How many prompts at once."""
    run.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="B",
        help="so many random prompts at once (default: %(default)s)",
    )


def budget(text: str) -> int | float:
    """A number of rows, or a share of the prompt."""
    try:
        return int(text)
    except ValueError:
        return float(text)


budget.__name__ = "budget"  # argparse names it where both fail


def add_memory(run: argparse.ArgumentParser) -> None:
    """What a layer-major order makes possible."""
    memory = run.add_argument_group("less memory during the prefill, with layer_major")
    memory.add_argument(
        "--piece-rows",
        type=int,
        metavar="N",
        help="rows of a chunk that norms, projections and the MLP take at a time (default: 512; "
        "other schedules with chunks have it too)",
    )
    for name, text in PLACEMENT.items():
        memory.add_argument(flag_of(name), action="store_true", default=None, help=text)


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """The options of ``tidekv run`` that choose a method, for a prefill alone."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    for add in (add_model, add_untrained, add_methods, add_device, add_batch, add_memory):
        add(parser)
    parser.set_defaults(max_new_tokens=0)
    return parser
