"""A real model with real text, loaded as users load it.

The tests run within a process on a virtual GPU; see ``test_values.py``.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from memtrace.virtual_gpu import values
from tests.virtual_gpu.values import unread
from tests.virtual_gpu.values.generating import WAYS
from tidekv.errors import LoadError
from tidekv.loading import smollm2_folder


@pytest.fixture(scope="module")
def smollm2():
    """The model on the CPU, the same on the virtual GPU, and the tokenizer."""
    try:
        folder = smollm2_folder()
    except LoadError as error:
        pytest.skip(str(error))
    on_cpu, on_device = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)
    )
    return on_cpu, on_device.to("cuda"), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", WAYS)
def test_generation_ends_as_on_the_cpu(smollm2, way, context):
    on_cpu, on_device, tokenizer = smollm2
    options = dict(WAYS[way])
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.eos_token
    texts = ["The sea is", "Once upon a time there was a small"]
    if options.pop("assisted", False):
        texts = texts[:1]
        options["prompt_lookup_num_tokens"] = 3
    rows = tokenizer(texts[: 2 if options.pop("padded", False) else 1], padding=True)
    before = unread()
    with context():
        shapes = [
            model.generate(
                **rows.convert_to_tensors("pt").to(model.device),
                max_new_tokens=5,
                **more,
                **options,
            ).shape
            for model, more in ((on_cpu, {"suppress_tokens": [0, 1, 2]}), (on_device, {}))
        ]
    assert shapes[0] == shapes[1]
    assert unread() == before


def test_its_mirrors_are_small(smollm2):
    weights = sum(parameter.nbytes for parameter in smollm2[1].parameters())
    assert values.summary()["mirror_bytes_peak"] <= weights / 10
