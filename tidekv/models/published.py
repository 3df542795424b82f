"""A layer as TideKV's authors appear to run it: stock modules, on a whole chunk at a time.

What is alive here is inferred from the figures that they published (docs/tables.md): nothing of it
is public. Only :class:`~tidekv.schedules.layer_major_published.LayerMajorPublished` uses it.
"""

from typing import Any

from tidekv import compat
from tidekv.models.stock import StandIn, Step, StockDecoder
from tidekv.models.tight import HEAD_NORM


class PublishedDecoder(StockDecoder):
    """The parts of a causal language model that the published schedule drives."""

    def advance(self, step: Step, hidden: list[Any], number: int) -> None:
        """One layer for chunk ``number`` of ``hidden``, (B, C, d) each, in exchange for its output.

        The chunk's input is free once attention was added to it; at the product in the MLP there
        are the residual, the MLP's input, its three (B, C, d_ff) and the rotary table. Families
        that can't be taken apart hold the input as well, as the forward of their model does.
        """
        if self.model.config.model_type not in HEAD_NORM:
            hidden[number] = self.output(step, hidden[number])
            return
        layer, residual = self.layers[step.index], hidden[number]
        hidden[number] = None
        table = self.rope_table(step.span)
        with self._serving(step):
            attended = layer.self_attn(
                hidden_states=layer.input_layernorm(residual),
                position_embeddings=table,
                attention_mask=None,
                **{compat.layer_cache_argument(layer.self_attn): StandIn()},
            )[0]
        residual = residual + attended
        del attended
        hidden[number] = residual + layer.mlp(layer.post_attention_layernorm(residual))
