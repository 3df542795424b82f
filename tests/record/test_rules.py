"""Automatic attribution of scripts that never heard of us: where rules hold and where they fail."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from memtrace import record_here, scopes
from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.places import SEPARATOR, place
from memtrace.trace.reader import open_trace

LAYERS, HIDDEN, KV_HEADS, HEAD, VOCABULARY = 3, 32, 2, 8, 96
KV_ROW = LAYERS * 2 * KV_HEADS * HEAD * 4  # bytes a token


@pytest.fixture
def account(tmp_path: Path) -> Callable[[Callable[[], object]], Account]:
    def run(work: Callable[[], object]) -> Account:
        with record_here(tmp_path / "run"):
            work()
        return accounts(open_trace(tmp_path / "run").processes[0])[0]

    return run


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def own_peak(account: Account, component: str) -> int:
    return account.components[component].peak


def places(account: Account, component: str) -> set[str]:
    """Where storages of a component were made."""
    contexts = account.process.contexts
    return {
        str(place(account.process, int(scope)))
        for label, scope, action in zip(
            contexts["component"], contexts["scope"], contexts["action"], strict=True
        )
        if label == component and action == 0
    }


def test_a_plain_generate_call_is_attributed(account) -> None:
    """Weights, cache, logits, hidden states and workspace each get their own component."""
    kept: list[object] = []

    def work() -> None:
        model = llama()
        prompt = torch.arange(40)[None] % VOCABULARY
        out = model.generate(
            prompt,
            max_new_tokens=5,
            do_sample=False,
            return_dict_in_generate=True,
            use_cache=True,
        )
        kept.extend((model, out))

    found = account(work)
    model = kept[0]
    weights = {p.untyped_storage()._cdata: p.nbytes for p in model.parameters()}
    buffers = sum(b.nbytes for b in model.buffers())
    assert found.components["model"].levels[-1] == sum(weights.values()) + buffers
    # 40 prompt tokens and 4 fed ones; the fifth is never fed.
    assert found.details["KV_res/full"].levels[-1] == 44 * KV_ROW
    assert own_peak(found, "Hidden") >= 2 * 40 * HIDDEN * 4  # a layer's input and output
    assert own_peak(found, "Act") >= 40 * 3 * 64 * 4  # gate, up and their product
    assert own_peak(found, "Temp") >= VOCABULARY * 4  # the logits
    assert found.components["other"].levels[-1] <= 1024  # the prompt
    assert any(
        p.startswith(SEPARATOR.join(("prefill", "layer 2", "mlp"))) for p in places(found, "Act")
    )
    assert any(
        p.startswith(SEPARATOR.join(("decode", "layer 0", "self_attn")))
        for p in places(found, "Act")
    )


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_recording_changes_no_value(account, grad) -> None:
    """The same kernels run: logits and gradients are equal to the last bit."""

    def logits(model: LlamaForCausalLM) -> torch.Tensor:
        with grad():
            out = model(torch.arange(40)[None]).logits
        if grad is torch.enable_grad:
            out.sum().backward()
            return model.lm_head.weight.grad
        return out

    plain = logits(llama())
    recorded: list[torch.Tensor] = []
    account(lambda: recorded.append(logits(llama())))
    assert torch.equal(plain, recorded[0])


def test_an_explicit_component_beats_every_rule(account) -> None:
    def work() -> None:
        model = llama()
        with scopes.component("backend"), torch.no_grad():
            model(torch.arange(8)[None], past_key_values=DynamicCache(config=model.config))

    found = account(work)
    assert own_peak(found, "Act") == own_peak(found, "KV_res") == own_peak(found, "Hidden") == 0
    assert own_peak(found, "backend") > 0


def test_the_users_own_phase_stands(account) -> None:
    def work() -> None:
        model = llama()
        with scopes.phase("warm-up"), torch.no_grad():
            model(torch.arange(8)[None])

    phases = {path.split(SEPARATOR)[0] for path in places(account(work), "Act")}
    assert "warm-up" in phases and "prefill" not in phases


def test_parameters_found_after_loading_belong_to_the_model(account) -> None:
    """``.to(dtype)`` swaps the storages under the parameters without registering them."""

    def work() -> None:
        model = llama().to(torch.float64)
        with torch.no_grad():
            model(torch.arange(4)[None])
        work.bytes = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())

    assert own_peak(account(work), "model") >= work.bytes


def test_what_loading_takes_is_the_models(account, tmp_path) -> None:
    """Copies that from_pretrained makes on the way to other dtypes are no unclaimed bytes."""
    llama().save_pretrained(tmp_path / "model")
    kept = []

    def work() -> None:
        kept.append(LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))

    found = account(work)
    weights = {p.untyped_storage()._cdata: p.nbytes for p in kept[0].parameters()}
    assert found.components["model"].levels[-1] >= sum(weights.values())
    assert own_peak(found, "other") <= 1024
    assert found.details["model/loading"].levels[-1] <= 1024


def test_a_model_that_is_no_transformer_is_model_and_act(account) -> None:
    def work() -> None:
        net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        net(torch.zeros(10, 16))

    found = account(work)
    assert own_peak(found, "model") == (16 * 64 + 64 + 64 * 4 + 4) * 4
    assert own_peak(found, "Act") >= 10 * 64 * 4


def test_where_rules_are_wrong(account) -> None:
    """A cache that is no transformers Cache counts as workspace; a sampling loop as other."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.store: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.store.append(self.proj(x))
            return x + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def work() -> None:
        model = Model()
        with torch.no_grad():
            ones = torch.ones(1, 100, 8)
            torch.softmax(model(ones), -1)
        work.kept = model

    found = account(work)
    assert own_peak(found, "KV_res") == 0
    assert found.components["Act"].levels[-1] == 100 * 8 * 4  # the hidden store
    assert own_peak(found, "other") >= 2 * 100 * 8 * 4  # the input and the softmax


def test_a_module_whose_address_is_reused_is_not_mistaken(account) -> None:
    """Roles follow the module, not its address."""

    def work() -> None:
        for _ in range(20):
            net = nn.Sequential(nn.Linear(4, 4))
            net(torch.zeros(1, 4))

    found = account(work)
    assert found.components["model"].levels[-1] <= own_peak(found, "model")
    assert own_peak(found, "model") <= 3 * (16 + 4) * 4


def test_compiled_and_hooked_modules_still_run(account) -> None:
    def work() -> None:
        model = llama()
        calls: list[str] = []
        model.model.layers[0].register_forward_hook(lambda *_: calls.append("hook"))
        with torch.no_grad():
            model(torch.arange(4)[None])
            torch.compile(model, backend="eager")(torch.arange(4)[None])
        work.calls = calls

    account(work)
    assert work.calls.count("hook") >= 1
