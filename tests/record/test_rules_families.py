"""Scripts of common families: almost nothing at the peak is left to ``other``."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memtrace.analysis.accounts import Account, accounts
from memtrace.analysis.places import place
from memtrace.trace.reader import ProcessTrace
from memtrace.trace.schema import Action
from tests.record.scripts import transformer

Record = Callable[..., ProcessTrace]

FAMILIES = ["llama", "qwen2", "mistral", "gpt_neox", "mixtral", "gemma", "gemma2", "gemma3"]
TOKENS, HIDDEN = transformer.PROMPT, transformer.HIDDEN


def on_cpu(process: ProcessTrace) -> Account:
    (account,) = accounts(process)
    return account


def at_peak(account: Account) -> dict[str, int]:
    event = account.allocated.peak_event
    assert event is not None
    return {name: series.read_one(event) for name, series in account.components.items()}


def scopes_of(process: ProcessTrace, component: str, kind: str) -> set[str]:
    """Names of the scopes of a kind around what was made as ``component``."""
    contexts, scopes, found = process.contexts, process.scopes, set()
    rows = zip(contexts["component"], contexts["action"], contexts["scope"], strict=True)
    for label, action, scope in rows:
        while label == component and action == Action.ALLOC and scope > 0:
            if scopes["kind"][scope] == kind:
                found.add(scopes["name"][scope])
            scope = scopes["parent"][scope]
    return found


# Each pair of the three comes up.
@pytest.mark.parametrize(
    ("grad", "attention", "how"),
    [
        ("no_grad", "eager", "forward"),
        ("no_grad", "sdpa", "generate"),
        ("inference_mode", "eager", "generate"),
        ("inference_mode", "sdpa", "forward"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_is_below_two_percent_of_the_peak(
    record: Record, family: str, grad: str, attention: str, how: str
) -> None:
    kept: list[object] = []

    def work() -> None:
        try:
            kept.append(transformer.run(family, "cpu", grad, attention, how))
        except ValueError:
            pytest.skip(f"this transformers has no {attention} attention for {family}")

    process = record(work)
    account = on_cpu(process)
    peak = at_peak(account)
    assert peak["other"] < 0.02 * sum(peak.values())
    weights = {p.untyped_storage()._cdata: p.nbytes for p in kept[0][0].parameters()}
    assert account.components["model"].levels[-1] >= sum(weights.values())
    layer = TOKENS * HIDDEN * 4
    assert account.components["Hidden"].peak >= 2 * layer  # a layer's input and output
    assert account.components["Temp"].peak >= 4 * transformer.VOCABULARY
    assert account.components["KV_res"].levels[-1] > 0
    if attention == "eager":
        assert account.components["backend"].peak >= TOKENS * TOKENS * 4  # the mask
    assert "layer" in process.scopes["kind"]


@pytest.mark.parametrize("how", ["forward", "generate"])
@pytest.mark.parametrize("family", ["gpt2", "t5", "mamba"])
def test_other_architectures_are_attributed_too(record: Record, family: str, how: str) -> None:
    """Learned positions, an encoder beside a decoder, and states instead of keys and values."""
    kept: list[object] = []
    process = record(lambda: kept.append(transformer.run(family, "cpu", "no_grad", "eager", how)))
    account = on_cpu(process)
    peak = at_peak(account)
    assert peak["other"] < 0.02 * sum(peak.values())
    assert account.components["KV_res"].peak > 0
    assert account.components["Hidden"].peak >= TOKENS * HIDDEN * 4


def test_experts_and_routers_have_their_own_scope(record: Record) -> None:
    process = record(lambda: transformer.run("mixtral", "cpu", "no_grad", "sdpa", "forward"))
    classes = scopes_of(process, "Act", "class")
    assert {"MixtralDecoderLayer", "MixtralSparseMoeBlock", "MixtralAttention"} <= classes
    assert any("Experts" in name or "MLP" in name for name in classes)


def test_what_an_encoder_hands_to_its_decoder_is_hidden(record: Record) -> None:
    kept: list[object] = []

    def work() -> None:
        out = transformer.run("t5", "cpu", "no_grad", "eager", "forward")[1]
        kept.append(out.encoder_last_hidden_state)

    account = on_cpu(record(work))
    assert account.components["Hidden"].levels[-1] == TOKENS * HIDDEN * 4


def test_logits_that_are_capped_after_the_head_are_temp(record: Record) -> None:
    kept: list[object] = []

    def work() -> None:
        kept.append(transformer.run("gemma2", "cpu", "no_grad", "eager", "forward")[1].logits)

    assert on_cpu(record(work)).components["Temp"].levels[-1] == kept[0].nbytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Plain(nn.Module):
    """A language model that never heard of transformers, nor of its getters."""

    def __init__(self, layers: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, 32)
        self.positions = nn.Embedding(64, 32)
        self.blocks = layers([Block(), Block()])
        self.head = nn.Linear(32, 500, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x), None


def test_a_model_without_getters_has_hidden_states_and_logits(record: Record) -> None:
    kept: list[object] = []

    def work() -> None:
        model = Plain()
        with torch.no_grad():
            kept.append(model(torch.arange(50)[None])[0])

    process = record(work)
    account = on_cpu(process)
    assert account.components["Temp"].levels[-1] == 50 * 500 * 4
    assert account.components["Hidden"].peak >= 2 * 50 * 32 * 4  # a layer's input and output
    where = {place(process, int(scope)).layer for scope in process.contexts["scope"]}
    assert where == {None, 0, 1}


def test_a_weight_is_the_models_before_it_is_registered(record: Record) -> None:
    """Making and converting a module never leaves its weights unclaimed."""

    def work() -> None:
        with torch.no_grad():
            nn.Linear(300, 300).double()

    account = on_cpu(record(work))
    both = (4 + 8) * 300 * 300 + 4 * 300  # a weight in both types, and a bias
    assert account.components["model"].peak == both
    assert account.components["other"].peak == 0


def test_where_the_rules_of_structure_are_wrong(record: Record) -> None:
    """Layers in something else than a ModuleList are workspace and no layers."""

    class Layers(nn.Module):
        def __init__(self, blocks: list[nn.Module]) -> None:
            super().__init__()
            self.first, self.second = blocks

        def __iter__(self):
            return iter((self.first, self.second))

    def work() -> None:
        with torch.no_grad():
            Plain(Layers)(torch.arange(50)[None])

    process = record(work)
    assert on_cpu(process).components["Hidden"].peak == 2 * 50 * 32 * 4  # the embeddings
    assert "layer" not in process.scopes["kind"]


def test_masks_are_recognised_in_models_imported_before_the_recording(record: Record) -> None:
    """Models hold on to the function they imported; each recording finds it there again."""
    model = transformer.model("llama", "cpu", "eager")
    ids = torch.arange(64)[None]

    def work() -> None:
        with torch.no_grad():
            model(ids)

    peaks = [on_cpu(record(work)).components["backend"].peak for _ in range(2)]
    assert peaks[0] == peaks[1] >= 64 * 64 * 4
    work()  # and nothing is left behind when none records
