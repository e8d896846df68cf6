"""The real `peft` package as outside proof: its adapters give the same loss and gradients, and read and merge ours."""

import warnings

import pytest
import torch

from tests.helpers.bars import assert_float64_parity
from tests.helpers.batches import nasty_documents, near_policy
from tests.oracles.step import exact, grpo_step
from tests.parity.cases import one_step
from tests.parity.test_layouts import settings
from tests.parity.test_oracle import PAPER
from workbench.policy.adapters import write_adapter
from workbench.policy.decoder import TINY
from workbench.policy.lora import merged_weights
from workbench.policy.model import load_policy
from workbench.policy.precision import lift_to_float64
from workbench.specs.lora import LoraSpec

peft = pytest.importorskip("peft")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "dense": ("tiny-qwen3", {"target_modules": "all-linear"}),
    "rslora_with_head": ("tiny-qwen3", {"target_modules": ["q_proj", "down_proj", "lm_head"], "use_rslora": True}),
    "expression": ("tiny-qwen3", {"target_modules": r"model\.layers\.[01]\.self_attn\.[vo]_proj"}),
    "saved": ("tiny-qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "experts": ("tiny-qwen3-moe", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
    "one_of_experts": ("tiny-qwen3-moe", {"target_modules": ["v_proj"], "target_parameters": EXPERTS[1:]}),
}
TIED = {"dense", "rslora_with_head", "experts"}


def base_of(kind, *, as_oracle=True):
    """The decoder that peft adapts, in float64: the oracle's, whose experts peft does not know, or a stock one."""
    source = KINDS[kind][0]
    model = TINY[source](19, tied=kind in TIED, seed=3)
    return exact(model) if as_oracle and source == "tiny-qwen3" else lift_to_float64(model)


def adapted(kind, alpha=5):
    config = peft.LoraConfig(r=3, lora_alpha=alpha, init_lora_weights=False, task_type="CAUSAL_LM", **KINDS[kind][1])
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        return peft.get_peft_model(base_of(kind), config).double().eval()


def saved(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_pefts_adapters_give_the_same_gradients(kind, tmp_path):
    model, paper = adapted(kind), PAPER | {"denominator": "token"}
    documents = nasty_documents(11)
    documents = near_policy(documents, grpo_step(model, documents, **paper)[2], 11, spread=0.25)
    loss, of_peft, _ = grpo_step(model, documents, **paper)
    folder = saved(model, tmp_path)
    case = settings({}) | {
        "model": {"source": KINDS[kind][0], "tied": kind in TIED, "seed": 3},
        "lora": {"source": str(folder)},
    }
    actual = one_step(case, documents)
    assert abs(actual["loss"] - loss) <= 1e-12 * max(1, abs(loss))
    names = {name for name, value in model.named_parameters() if value.requires_grad}
    expected = {ours(name): gradient for name, gradient in of_peft.items() if name in names}
    assert_float64_parity(as_in_files(actual["gradients"]), expected, context=kind)


def ours(name):
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", "")


def as_in_files(gradients):
    """Gradients under the names and in the shapes of peft's own parameters."""
    results = {}
    both = any("gate_up_proj" in name for name in gradients)
    for name, value in gradients.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight":
            results[name] = value
            continue
        module, _, factor = module.rpartition(".")
        inner = ".base_layer" if parameter == "gate_up_proj" and both else ""
        flat = value.reshape(-1, value.shape[2]) if factor == "lora_A" else value.permute(1, 2, 0).flatten(1)
        results[f"{module}{inner}.{factor}.weight"] = flat
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_peft_reads_what_is_written(kind, tmp_path):
    """Its logits on the base are those of the merged weights."""
    source, lora = KINDS[kind]
    lora = {name: value if isinstance(value, str | bool) else tuple(value) for name, value in lora.items()}
    spec = LoraSpec(r=3, lora_alpha=5, init_lora_weights="random", **lora)
    policy = load_policy(source, precision="float64", tied=kind in TIED, seed=3, lora=spec)
    values = {name: policy.model.get_parameter(name).detach().clone() for name in policy.lora.trained}
    for name in policy.lora.saved:
        values[name] += 0.1 * torch.randn_like(values[name])
    write_adapter(tmp_path, policy.lora, values, base=source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base_of(kind, as_oracle=False), tmp_path, autocast_adapter_dtype=False)
    everything = {name: value.detach() for name, value in policy.model.named_parameters()} | values
    merged = lift_to_float64(TINY[source](19, tied=False, seed=3))
    weights = merged_weights(policy.lora, everything)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    merged.load_state_dict(weights, strict=False)
    tokens = torch.tensor([[3, 12, 4, 15, 7, 1]])
    with torch.no_grad():
        logits = merged(input_ids=tokens).logits
        assert torch.allclose(model.eval()(input_ids=tokens).logits, logits, rtol=0, atol=1e-12)
        plain = base_of(kind, as_oracle=False)(input_ids=tokens).logits
    assert not torch.allclose(plain, logits, atol=1e-3), "the adapter matters"


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_merge_in_bfloat16_has_pefts_bits(kind, tmp_path):
    model = adapted(kind, alpha=6).bfloat16()  # a scale of 2 rounds nothing, on a CPU as on a GPU
    folder = saved(model, tmp_path)
    policy = load_policy(KINDS[kind][0], precision="bfloat16", tied=True, seed=3, lora=LoraSpec(source=str(folder)))
    ours = merged_weights(
        policy.lora, {name: v.detach() for name, v in policy.model.named_parameters()}, "merged_bfloat16"
    )
    theirs = dict(model.merge_and_unload().named_parameters())
    for each in policy.lora.adapted:
        assert torch.equal(ours[each.weight], theirs[each.weight]), each.weight
