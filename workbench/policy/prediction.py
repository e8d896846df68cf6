"""Layers that predict further tokens of each position, added to a decoder: multi-token prediction (MTP).

Depth k = 1, 2, ... reads the hidden states of depth k - 1 (of depth 0: the decoder's last ones) and the embedding of
the token k ahead, and predicts the token k + 1 ahead with the decoder's own head:

    x_i = eh_proj [enorm(embedding(t_{i+k})); hnorm(h_i)]       h_i <- post_norm(layer(x)_i)

The layer is one of the decoder's own class. It runs through the decoder's own forward, in which the layers are this
one and the last norm is the depth's, so that its rotary angles, attention over shards and hooks are the decoder's.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21 to 23. The paper leaves two things open, which are as
        in `transformers.modeling_layers.MtpModel` and Megatron-LM's multi_token_prediction: h of depth 0 is behind the
        last norm, and h of a depth behind its own. The embedding comes first, as in checkpoints of DeepSeek and GLM.

Letters: t tokens of this rank | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.attention import PREDICTION_COUNTS
from workbench.policy.stages import anatomy, instead, skip
from workbench.policy.tensor_plan import PREDICTION, PREDICTION_LAYER
from workbench.sharding.sequence_parallel import Stream


class PredictionLayer(nn.Module):
    """The parameters of one depth, by the names of `transformers.modeling_layers.MtpLayer`."""

    def __init__(self, config: Any, layer_class: type[nn.Module], norm: Any, number: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.enorm, self.hnorm, self.post_norm = (type(norm)(width, eps=norm.variance_epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.add_module(PREDICTION_LAYER, layer_class(config, number))

    def mixed(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Input of the layer. Shapes: [..., D], [..., D] -> [..., D]."""
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))


@dataclass(frozen=True)
class Prediction:
    """The depths of a decoder, after `add_prediction` and after it was sharded for this rank.

    Attributes:
        model: the decoder, sharded for this rank.
        list_name, norm_name: attributes of its base that hold its layers and its last norm.
        stream: layout of hidden states between its blocks.
    """

    model: Any
    list_name: str
    norm_name: str
    stream: Stream

    @property
    def depths(self) -> int:
        """Number of depths."""
        return len(getattr(self.model.base_model, PREDICTION))

    def hidden_states(
        self, hidden_TD: Tensor, tokens_TK: Tensor, *, detach: str = "nothing", **inputs: Any
    ) -> Iterator[Tensor]:
        """Hidden states [t, D] of each depth, in order, from the decoder's last ones.

        ``tokens_TK`` has the token k ahead of each position in column k - 1, negative where its document has none:
        nothing that counts depends on such a position. ``inputs`` are those of the decoder: positions, shard.

        Layout:   as `Policy.hidden_states`. Collective over cp, tp and ep.
        Backward: to the depths' parameters; ``detach`` "hidden_states" stops the gradient to ``hidden_TD``, and
                  "policy" also that to the embedding.
        """
        base = self.model.base_model
        if detach != "nothing":
            hidden_TD = hidden_TD.detach()
        for layer, tokens_T in zip(getattr(base, PREDICTION), tokens_TK.unbind(1), strict=True):
            embeddings = embeddings_of(self.model, tokens_T)
            if detach == "policy":
                embeddings = embeddings.detach()
            mixed = layer.mixed(embeddings, self.stream.local_tokens(hidden_TD[None]))
            with instead(base, {self.list_name: [getattr(layer, PREDICTION_LAYER)], self.norm_name: layer.post_norm}):
                hidden_TD = base(inputs_embeds=mixed, use_cache=False, **inputs).last_hidden_state[0]
            yield hidden_TD


def embeddings_of(model: Any, tokens_T: Tensor) -> Tensor:
    """Embeddings [1, t, D] of tokens (1 / tp of them with sequence parallelism); of token 0 where there is none."""
    return model.get_input_embeddings()(tokens_T.clamp_min(0)[None])


def prediction_layers(model: Any) -> list[nn.Module]:
    """The decoder layer of each depth, in order, which a forward of the decoder itself leaves out."""
    return [getattr(depth, PREDICTION_LAYER) for depth in getattr(model.base_model, PREDICTION, ())]


def add_prediction(model: Any, depths: int, *, seed: int, from_checkpoint: bool) -> tuple[str, str]:
    """Add layers that predict further tokens to an unsharded decoder, in place, as ``model.prediction`` of its base.

    Weights are those of the checkpoint if its configuration counts such layers, else drawn from ``seed``, if the model
    is a tiny one. The global random state is preserved.

    Returns:
        Attributes of its base that hold the list of its layers, and the norm behind them.

    Raises:
        SpecError: a checkpoint without these layers or with fewer, or a decoder whose forward cannot run a layer alone.
    """
    config, base = model.config.get_text_config(), model.base_model
    known = next((count for name in PREDICTION_COUNTS if (count := getattr(config, name, None))), 0)
    if from_checkpoint and depths > known:
        _refuse(
            model,
            f"{known} such layers in the checkpoint",
            "weights of a checkpoint are its own: none are drawn at random",
            f"take depths: {known}" if known else "leave prediction out, or take a tiny model",
        )
    list_name, norm_name = _places(model)
    layers, norm = getattr(base, list_name), getattr(base, norm_name)
    given = _given(model) if from_checkpoint else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)  # the decoder's own weights are drawn from the seed itself
        added = nn.ModuleList(PredictionLayer(config, type(layers[-1]), norm, len(layers) - 1) for _ in range(depths))
        for module in added.modules():
            model._init_weights(module)
    if given is not None:
        for number, layer in enumerate(added):
            layer.load_state_dict(given[number])
    setattr(base, PREDICTION, added.to(norm.weight.dtype).eval())
    _check(model, list_name, norm_name)
    return list_name, norm_name


def _places(model: Any) -> tuple[str, str]:
    """Attributes of the base that hold the list of layers, and the one norm behind it."""
    list_name, tail = anatomy(model)
    norms = [name for name in tail if name != PREDICTION]
    norm = getattr(model.base_model, norms[0], None) if len(norms) == 1 else None
    if norm is None or not hasattr(norm, "variance_epsilon"):
        _refuse(
            model,
            f"{', '.join(norms) or 'nothing'} behind its layers",
            "one root-mean-square norm, whose kind the added layers share",
            "leave prediction out for this model",
        )
    return list_name, norms[0]


def _check(model: Any, list_name: str, norm_name: str) -> None:
    """Raise if a decoder without layers and norm changes the embeddings that it is given."""
    given = torch.linspace(-1, 1, 3 * model.config.get_text_config().hidden_size).reshape(1, 3, -1)
    given = given.to(next(model.parameters()))
    with torch.no_grad(), instead(model.base_model, {list_name: [], norm_name: skip}):
        result = model.base_model(inputs_embeds=given, use_cache=False).last_hidden_state
    if not torch.equal(result, given):
        _refuse(
            model,
            "a forward that scales or shifts the embeddings that it is given",
            "what enters the decoder is the input of its first layer",
            "leave prediction out for this model",
        )


def _given(model: Any) -> list[dict[str, Tensor]]:
    """Weights of each depth in the checkpoint, by the names of `PredictionLayer`, as `transformers` reads them."""
    from transformers.modeling_layers import MtpModel

    config = model.config.get_text_config()
    own = [
        name
        for name, usual in (("mtp_hidden_states_first", False), ("chain_hidden_post_norm", None))
        if getattr(config, name, usual) != usual
    ]
    if own:
        _refuse(model, ", ".join(own), "layers as in DeepSeek-V3 and GLM-4.5", "leave prediction out for this model")
    try:
        loaded = MtpModel.from_pretrained(model)
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        _refuse(
            model,
            str(error).splitlines()[0],
            "a checkpoint whose layers for prediction transformers can read",
            "leave prediction out for this model",
        )
    return [layer.state_dict() for layer in loaded.layers]


def _refuse(model: Any, found: str, rule: str, fix: str) -> Any:
    raise SpecError(
        f"prediction.depths with model type {model.config.get_text_config().model_type!r}",
        found=found,
        rule=rule,
        fix=fix,
    )
