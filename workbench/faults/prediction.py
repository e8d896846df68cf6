"""Known bugs: layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.policy.routers import Routers, Routes, replayed_gates
from workbench.policy.tensor_plan import of_prediction
from workbench.rollouts.targets import AHEAD_WEIGHTS, TrainingRow

ONE_DEPTH = {"prediction": {"depths": 1, "coefficient": 0.3}}
NONE = {"prediction": {"depths": 0, "coefficient": 0.1}}


def _with_weights(local: Any, weights_TK: Tensor) -> Any:
    row = local.row
    return replace(local, row=replace(row, extensions=row.extensions | {AHEAD_WEIGHTS: weights_TK}))


@fault(
    seam="prediction_terms",
    origin="NVIDIA/Megatron-LM#7452 (finding 3) and #7498",
    signature="the prediction's loss and gradient weigh each shard of a row by its own share of tokens with a further "
    "one, which is no constant; the policy's are right; no effect where all shards have the same share",
    shows_in={"layout": {"cp": 2}} | ONE_DEPTH,
    hidden_in=NONE,
    detected_by="tests/faults/test_prediction_faults.py::test_shards_weigh_by_counts_of_their_own",
)
def prediction_counts_of_shards(prediction_terms: Callable, policy: Any, hidden: Tensor, local: Any, spec: Any) -> Any:
    """The loss of further tokens is rescaled by a rank's own counts of tokens, before one division by the step's."""
    of_step_T, weights_TK = local.weights["token"].loss_T, local.row.extensions[AHEAD_WEIGHTS]
    own_K = (weights_TK != 0).sum(0).clamp_min(1)
    scale_K = spec.coefficient / spec.depths * of_step_T.sum() / own_K
    return prediction_terms(policy, hidden, _with_weights(local, (weights_TK != 0) * scale_K), spec)


@fault(
    seam="prediction_terms",
    origin="NVIDIA/Megatron-LM#3943 and #3959",
    signature="the prediction's loss and gradient exactly 1 / cp of the right ones, the policy's right",
    shows_in={"layout": {"cp": 2}} | ONE_DEPTH,
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_prediction_faults.py::test_the_prediction_is_one_over_cp_of_itself",
)
def prediction_over_cp(prediction_terms: Callable, policy: Any, hidden: Tensor, local: Any, spec: Any) -> Any:
    """The loss of further tokens misses the cp that undoes the mean over context-parallel ranks."""
    weights_TK = local.row.extensions[AHEAD_WEIGHTS] / policy.mesh["cp"].size
    return prediction_terms(policy, hidden, _with_weights(local, weights_TK), spec)


@fault(
    seam="prediction_terms",
    origin="NVIDIA/Megatron-LM#1532, #2417 and #3159",
    signature="the prediction's loss and gradient too big by exactly the tokens of the step that have a further one, "
    "the policy's right: they dominate the gradient",
    shows_in=ONE_DEPTH,
    hidden_in=NONE,
    detected_by="tests/faults/test_prediction_faults.py::test_a_sum_over_tokens_is_their_number_too_big",
)
def prediction_not_normalised(prediction_terms: Callable, policy: Any, hidden: Tensor, local: Any, spec: Any) -> Any:
    """The loss of further tokens is their sum, in a step whose other terms are means."""
    of_mean_TK = local.row.extensions[AHEAD_WEIGHTS]
    weights_TK = (of_mean_TK != 0).to(of_mean_TK.dtype) * (spec.coefficient / spec.depths)
    return prediction_terms(policy, hidden, _with_weights(local, weights_TK), spec)


@fault(
    seam="workbench.train.prediction:tokens_ahead",
    origin="huggingface/transformers#47394 and #46898, radixark/miles#2215",
    signature="the prediction's loss near that of a random guess, the policy's right; the layer learns to skip a token",
    shows_in=ONE_DEPTH,
    hidden_in=NONE,
    detected_by="tests/faults/test_prediction_faults.py::test_targets_shifted_again_are_those_of_the_next_depth",
)
def prediction_targets_shifted_again(tokens_ahead: Callable, row: TrainingRow, depths: int) -> tuple[Tensor, Tensor]:
    """Targets that are shifted to their depth already are shifted once more inside the loss."""
    tokens_TK, _ = tokens_ahead(row, depths)
    further_TK, counts_TK = tokens_ahead(row, depths + 1)
    return torch.cat([tokens_TK[:, :depths], further_TK[:, depths + 1 :]], dim=1), counts_TK[:, 1:]


@fault(
    seam="workbench.train.prediction:tokens_ahead",
    origin="pytorch/torchtitan#4544, NVIDIA-NeMo/Automodel#3544 (rolled tokens of packed rows)",
    signature="the prediction learns the first tokens of the next document at the end of each, over too many tokens; "
    "the policy right; no effect with one document per row",
    shows_in=ONE_DEPTH,
    hidden_in=NONE,
    detected_by="tests/faults/test_prediction_faults.py::test_rolled_tokens_cross_the_ends_of_documents",
)
def prediction_across_documents(tokens_ahead: Callable, row: TrainingRow, depths: int) -> tuple[Tensor, Tensor]:
    """Tokens ahead are a roll of the packed row, which does not stop at the end of a document."""
    one = torch.zeros_like(row.document_ids_T)
    rolled = replace(row, document_ids_T=one, source_T=one, targets_T=row.tokens_T.roll(-1))
    return tokens_ahead(rolled, depths)


@fault(
    seam="workbench.policy.model:install_routers",
    origin="NVIDIA-NeMo/RL#3903",
    signature="the prediction's loss and gradient are those of other experts than its router chooses; the policy "
    "right; no effect without noted or replayed routes, or with a dense layer",
    shows_in={"model": {"source": "tiny-qwen3-moe"}, "routing": {"record": True}} | ONE_DEPTH,
    hidden_in={"routing": {"record": False}},
    detected_by="tests/faults/test_prediction_faults.py::test_the_prediction_takes_the_experts_of_the_first_mixture",
)
def prediction_replays_first_mixture(install_routers: Callable, model: Any, **more: Any) -> Routers:
    """Layers of a prediction are numbered from the first one again, so a router takes a decoder layer's routes."""
    routers = install_routers(model, **more)
    during = routers._during
    last: list[Routes] = []

    @contextmanager
    def noting(routes: Routes | None) -> Iterator[None]:
        if routes is not None:
            last[:] = [routes]
        with during(routes):
            yield

    def replaying(router: Any, forward: Callable) -> Callable:
        def replayed(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_tE, gates_tk, own_tk = forward(hidden)
            if not last or 0 not in last[0].noted:
                return logits_tE, gates_tk, own_tk
            taken_tk = last[0].noted[0].taken_tk
            return logits_tE, replayed_gates(router, logits_tE, taken_tk).to(gates_tk.dtype), taken_tk

        return replayed

    setattr(routers, "_during", noting)  # noqa: B010 a method of this object alone
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router") and of_prediction(name):
            module.forward = replaying(module, module.forward)
    return routers
