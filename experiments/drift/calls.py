"""Calls of a release's own loss functions on drawn inputs: ``python calls.py SYSTEM FOLDER CASES.pt RESULTS.pt``.

Runs in the environment of `make drift`, with FOLDER, where the release was installed, on the path. Nothing of a release
is changed. Packages that its file imports and its losses do not call are placeholders, and ``__init__`` of its packages
above the file is not executed. Each case is called twice: as it is, and with float32 lifted to float64 (constants of
the default type, casts by ``.float()`` and ``.to``), which tells the precision of the release from its formulas.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor

Case = Mapping[str, Any]
Call = Callable[[Case, Mapping[str, Tensor]], tuple[Tensor, Tensor, Mapping[str, Any]]]
"""(case, its arrays) -> (loss, leaf, numbers by the system's names)."""


class _Placeholder(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of placeholders, asked after all others: an installed package is never replaced."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the placeholder empty."""


def prepare(folder: str, packages: Sequence[str], absent: Sequence[str] = ()) -> None:
    """Make packages of a folder importable without their ``__init__``, and placeholders of absent ones."""
    sys.path.insert(0, folder)
    sys.meta_path.append(_Placeholders(absent))
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = module
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


# ---- systems -------------------------------------------------------------------------------------------------------


def openrlhf(folder: str) -> tuple[Call, list[str]]:
    """`PolicyLoss` of OpenRLHF."""
    prepare(folder, ["openrlhf", "openrlhf.models"], ["deepspeed"])
    policy_loss = importlib.import_module("openrlhf.models.loss").PolicyLoss
    of_call = ("dp_size", "batch_num_tokens", "global_batch_size")

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        config, x = dict(case["config"]), arrays["logprobs"]
        given = {name: config.pop(name) for name in of_call if name in config}
        old, sampler, mask = arrays["old_logprobs"], arrays["rollout_logprobs"], arrays["mask"]
        loss, clip, kl, of_sampler, filtered = policy_loss(**config)(
            x, old, arrays["advantages"], mask, sampler, **given
        )
        numbers = {"clip_ratio": clip, "ppo_kl": kl, "vllm_kl": of_sampler, "is_filter_ratio": filtered}
        return loss, x, numbers

    return call, [name for name in inspect.signature(policy_loss.__init__).parameters if name != "self"]


def verl(folder: str) -> tuple[Call, list[str]]:
    """Registered policy losses of verl."""
    prepare(folder, ["verl", "verl.trainer", "verl.trainer.ppo"], ["ray", "cachetools", "orjson"])
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    config_of = importlib.import_module("verl.workers.config.actor")

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        config, x = dict(case["config"]), arrays["logprobs"]
        own = config_of.PolicyLossConfig(**config.pop("policy_loss"))
        info = config.pop("global_batch_info", {})
        more = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
        actor = config_of.ActorConfig(policy_loss=own, **more, **config)
        object.__setattr__(actor, "global_batch_info", info)
        loss, numbers = algorithms.get_policy_loss_fn(own.loss_mode)(
            old_log_prob=arrays["old_logprobs"],
            log_prob=x,
            advantages=arrays["advantages"],
            response_mask=arrays["mask"].bool(),
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
            rollout_is_weights=arrays.get("is_weights"),
        )
        return loss, x, numbers

    options = [field.name for kind in (config_of.ActorConfig, config_of.PolicyLossConfig) for field in fields(kind)]
    return call, [*options, *algorithms.POLICY_LOSS_REGISTRY]


def trl(folder: str) -> tuple[Call, list[str]]:
    """`GRPOTrainer._compute_loss` of TRL, on an object that has its attributes."""
    sys.path.insert(0, folder)
    trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    config_class = importlib.import_module("trl.trainer.grpo_config").GRPOConfig

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        config, x = dict(case["config"]), arrays["logprobs"]
        mask = arrays["mask"]
        items, of_weights = config.pop("num_items_in_batch", None), config.pop("vllm_is", None)
        accelerator = SimpleNamespace(
            num_processes=1, gather=lambda value: value, gather_for_metrics=lambda value: value,
            reduce=lambda value, **_: value, pad_across_processes=lambda value, **_: value, sync_gradients=True,
        )  # fmt: skip
        metrics = _Metrics()
        owner = SimpleNamespace(
            args=SimpleNamespace(**config), accelerator=accelerator, model=SimpleNamespace(training=True),
            beta=config["beta"], epsilon_low=config["epsilon_low"], epsilon_high=config["epsilon_high"],
            loss_type=config["loss_type"], importance_sampling_level=config["importance_sampling_level"],
            top_entropy_quantile=config["top_entropy_quantile"], entropy_coef=config["entropy_coef"],
            off_policy_mask_threshold=config["off_policy_mask_threshold"], use_adaptive_entropy=False,
            _entropy_bonus_enabled=config["entropy_coef"] != 0, aux_loss_enabled=False, router_aux_loss_coef=0.0,
            use_vllm=of_weights is not None, vllm_importance_sampling_correction=of_weights is not None,
            max_completion_length=config["max_completion_length"], _metrics={"train": metrics},
            current_gradient_accumulation_steps=config["gradient_accumulation_steps"],
            get_off_policy_mask=trainer.get_off_policy_mask, get_gamma_weights=trainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *_, **__: (x, arrays["entropies"], None),
        )  # fmt: skip
        owner.get_high_entropy_mask = types.MethodType(trainer.get_high_entropy_mask, owner)
        ids = torch.zeros_like(mask, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": mask.long(), "advantages": arrays["advantages"],
            "ref_per_token_logps": arrays["ref_logprobs"], "num_items_in_batch": torch.as_tensor(items or 0.0),
        }  # fmt: skip
        for name, ours in (("old_per_token_logps", "old_logprobs"), ("importance_sampling_ratio", "is_weights")):
            if ours in arrays:
                inputs[name] = arrays[ours]
        loss = trainer._compute_loss(owner, owner.model, inputs)
        return loss, x, {name: values[-1] for name, values in metrics.items() if values}

    return call, [field.name for field in fields(config_class)]


class _Metrics(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


def areal(folder: str) -> tuple[Call, list[str]]:
    """`ppo_actor_loss_fn` and `sapo_loss_fn` of AReaL."""
    packages = ["areal", "areal.utils", "areal.utils.functional", "areal.api", "areal.engine", "areal.infra"]
    prepare(folder, packages, ["ray", "numba"])
    sys.modules["areal.engine.fsdp_utils"] = _Placeholder("areal.engine.fsdp_utils")
    sys.modules["areal.engine.fsdp_utils.attn_impl"] = _Placeholder("areal.engine.fsdp_utils.attn_impl")
    sys.modules["areal.infra.platforms"] = _Placeholder("areal.infra.platforms")
    functions = importlib.import_module("areal.utils.functional.functional")
    config_of = importlib.import_module("areal.api.cli_args")

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        config, x = dict(case["config"]), arrays["logprobs"]
        mask, level = arrays["mask"].bool(), config["importance_sampling_level"]
        if config["use_sapo_loss"]:
            loss, _ = functions.sapo_loss_fn(
                x, arrays["old_logprobs"], arrays["advantages"], config["sapo_tau_pos"], config["sapo_tau_neg"],
                mask, importance_sampling_level=level,
            )  # fmt: skip
            return loss, x, {}
        rule = config["rejection_sampling"]
        loss, _ = functions.ppo_actor_loss_fn(
            x, arrays["old_logprobs"], arrays["rollout_logprobs"], arrays["advantages"], config["eps_clip"], mask,
            eps_clip_higher=config["eps_clip_higher"], c_clip=config["c_clip"],
            rejection_sampling=None if rule is None else config_of.RejectionSamplingConfig(**rule),
            importance_sampling_level=level,
        )  # fmt: skip
        return loss, x, {}

    options = [field.name for kind in (config_of.PPOActorConfig,) for field in fields(kind)]
    return call, options


def liger(folder: str) -> tuple[Call, list[str]]:
    """`LigerFusedLinearGRPOLoss`, the chunked path that runs on a CPU."""
    prepare(folder, ["liger_kernel", "liger_kernel.chunked_loss"], ["triton"])
    loss_class = importlib.import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        config, x = dict(case["config"]), arrays["hidden"]
        items, _ = config.pop("num_items_in_batch", None), config.pop("vllm_is", None)
        vespo = config.pop("vespo", None) or {}
        config |= {f"vespo_{name}": value for name, value in vespo.items()}
        function = loss_class(compiled=False, **config)
        loss, metrics = function(
            x, arrays["weight"], arrays["targets"], arrays["mask"], arrays["advantages"],
            ref_per_token_logps=arrays.get("ref_logprobs"), old_per_token_logps=arrays.get("old_logprobs"),
            vllm_is_ratio=arrays.get("is_weights"),
            num_items_in_batch=None if items is None else torch.as_tensor(items),
        )  # fmt: skip
        return loss, x, dict(zip(("kl", "clip_fraction")[-len(metrics) :], metrics, strict=True))

    return call, [name for name in inspect.signature(loss_class.__init__).parameters if name != "self"]


def skyrl(folder: str) -> tuple[Call, list[str]]:
    """Policy losses of SkyRL, with the division of the advantages before them and the penalties after them."""
    packages = ["skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"]
    prepare(folder, [*packages, "skyrl.train", "skyrl.train.config"], ["ray", "skyrl_gym", "cloudpickle"])
    importlib.import_module("ray").is_initialized = lambda: False  # registries stay in this process
    config_of = importlib.import_module("skyrl.train.config.config")
    sys.modules[
        "skyrl.train.config"
    ].AlgorithmConfig = config_of.AlgorithmConfig  # of the __init__ that is not executed
    utils = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    kinds = {"off_policy_correction": config_of.OffPolicyCorrectionConfig, "sapo": config_of.SAPOConfig}
    kinds |= {"cispo": config_of.CISPOConfig, "dppo": config_of.DPPOConfig}

    def call(case: Case, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Any]]:
        options, x, mask = dict(case["config"]), arrays["logprobs"], arrays["mask"]
        config = config_of.AlgorithmConfig(
            **{name: kinds[name](**value) if name in kinds else value for name, value in options.items()}
        )
        sizes = arrays["group_ids"][:, 0].unique_consecutive(return_counts=True)[1].tolist()
        scaled = utils.apply_loss_reduction_to_advantages_minibatch(
            arrays["advantages"], mask, config.loss_reduction, len(mask), config.max_seq_len,
            prompt_boundaries=list(itertools.pairwise([0, *itertools.accumulate(sizes)])),
        )  # fmt: skip
        loss, of_loss = utils.PolicyLossRegistry.get(config.policy_loss_type)(
            x,
            arrays["old_logprobs"],
            scaled,
            config=config,
            loss_mask=mask,
            rollout_logprobs=arrays["rollout_logprobs"],
        )
        numbers = {f"policy/loss_metrics/{name}": value for name, value in of_loss.items()}
        entropy = utils.masked_mean(arrays["entropies"], mask)
        numbers["policy/policy_entropy"] = entropy
        if config.use_entropy_loss:
            loss = loss - entropy * config.entropy_loss_coef
        if config.use_kl_loss:
            of_tokens = utils.compute_approx_kl(
                x, arrays["ref_logprobs"], loss_mask=mask, kl_estimator_type=config.kl_estimator_type
            )
            kl = utils.masked_mean(of_tokens, mask, dim=-1).mean()
            numbers["policy/policy_kl"] = kl
            loss = loss + kl * config.kl_loss_coef
        return loss, x, numbers

    return call, [field.name for field in fields(config_of.AlgorithmConfig)]


SYSTEMS = {"openrlhf": openrlhf, "verl": verl, "trl": trl, "areal": areal, "liger": liger, "skyrl": skyrl}


# ---- results -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Make float32 float64 while a release computes: default type, ``.float()``, ``.to`` and ``torch.float32``."""
    kept = Tensor.float, Tensor.to, torch.get_default_dtype(), torch.float32, torch.float

    def to(value: Tensor, *arguments: Any, **named: Any) -> Tensor:
        wide = [torch.float64 if one is kept[3] else one for one in arguments]
        named = {name: torch.float64 if one is kept[3] else one for name, one in named.items()}
        return kept[1](value, *wide, **named)

    Tensor.float, Tensor.to = Tensor.double, to  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    try:
        yield
    finally:
        torch.float32, torch.float = kept[3], kept[4]  # type: ignore[misc]
        torch.set_default_dtype(kept[2])
        Tensor.float, Tensor.to = kept[0], kept[1]  # type: ignore[method-assign]


def result(call: Call, case: Case) -> dict[str, Any]:
    """Call a case; an exception of the release is a result, too."""
    leaf = "hidden" if "hidden" in case["arrays"] else "logprobs"
    arrays = {name: value.clone() for name, value in case["arrays"].items()}
    arrays[leaf].requires_grad_()
    try:
        loss, x, numbers = call(case, arrays)
        loss.backward()
    except Exception as error:  # of any kind: it is what the release does with this case
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    numbers = {name: float(value) for name, value in numbers.items() if value is not None}
    return {"loss": loss.detach().double(), f"grad_{leaf}": x.grad.double(), "metrics": numbers}


def main(system: str, folder: str, cases_file: str, results_file: str) -> None:
    """Call every case of a file in both ways, and write results, options and versions."""
    torch.set_num_threads(1)
    cases = torch.load(cases_file, weights_only=True)
    call, options = SYSTEMS[system](folder)
    as_it_is = [result(call, case) for case in cases]
    with lifted():
        of_float64 = [result(call, case) for case in cases]
    torch.save({"as_it_is": as_it_is, "lifted": of_float64, "options": options}, results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
