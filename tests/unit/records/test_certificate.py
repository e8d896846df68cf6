"""A certificate of a step: which bits it sees, that no layout of the reproducible mode changes it, and its file."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.planted_ulp import plant
from workbench.errors import RecordError
from workbench.records.certificate import (
    Certificate,
    check_certificate,
    compared_bitwise,
    fingerprint_label,
    read_certificate,
)
from workbench.records.directory import RunDirectory
from workbench.records.integrity import check_gradients
from workbench.reproducible.fingerprints import fingerprint
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[3]
BASE = {
    "model": {"source": "tiny-qwen3", "tied": False},
    "data": {"documents_per_step": 6, "micro_batches": 2},
    "steps": 2,
    "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.01},
    "record": {"certificate": True, "gradients": "full"},
}
EXACT = {"reproducible": {"block_tokens": 8, "weight_chunks": 2}, "record": {"gradients": "none", "tokens": False}}


@pytest.fixture
def ran(tmp_path):
    def run(**changes):
        spec = RunSpec.model_validate(BASE).merged(changes)
        directory = RunDirectory.create(tmp_path, "one", spec)
        run_here(directory, PROJECT)
        return directory

    return run


def hashes(run):
    return [step.get("certificate") for step in run.steps()]


class TestOfARun:
    def test_is_made_of_the_recorded_tensors(self, ran):
        run = ran()
        result = read_certificate(run, 0)
        gradients, tokens = run.read_tensors("step0000.gradients"), run.read_tensors("step0000.tokens")
        assert result.fingerprints["logprobs"] == f"float32 {fingerprint(tokens['policy_logprobs']):016x}"
        for name, gradient in gradients.items():
            assert result.fingerprints[f"gradient/{name}"] == f"float32 {fingerprint(gradient):016x}", name
        total = torch.tensor(run.steps()[0]["loss/total/sum"], dtype=torch.float64)
        assert result.fingerprints["loss/total/sum"] == f"float64 {fingerprint(total):016x}"
        assert run.steps()[0]["gradient/clip/coefficient"] < 1, "gradients are kept as they were before clipping"
        assert result.hash == run.steps()[0]["certificate"]

    def test_stands_in_the_order_of_computation(self, ran):
        names = list(read_certificate(ran(steps=1), 0).fingerprints)
        gradients = [name for name in names if name.startswith("gradient/")]
        weights = [name for name in names if name.startswith("weight/")]
        assert names[0] == "logprobs"
        assert names[1:3] == ["loss/policy/sum", "loss/total/sum"]
        assert names[3:] == gradients + weights
        assert (gradients[0], gradients[-1]) == ("gradient/lm_head.weight", "gradient/model.embed_tokens.weight")
        assert weights[0] == "weight/model.embed_tokens.weight"

    def test_weights_are_those_after_the_step(self, ran):
        one, two = ran(steps=1), ran(steps=1, optimizer={"learning_rate": 2e-3})
        differing = read_certificate(one, 0).differing(read_certificate(two, 0))
        assert {name.partition("/")[0] for name in differing} == {"weight"}
        assert len(differing) == 36, "every parameter moved by another length"

    def test_a_repeated_run_has_the_same_and_is_off_by_default(self, ran):
        assert hashes(ran()) == hashes(ran())
        assert hashes(ran(record={"certificate": None}, steps=1)) == [None]
        assert not list(ran(record={"certificate": None}, steps=1).path.glob("certificates/*"))

    def test_needs_no_tensors_on_disk(self, ran):
        bare = ran(record={"gradients": "none", "tokens": False})
        assert hashes(bare) == hashes(ran())
        assert not (bare.path / "tensors").exists()


class TestInTheReproducibleMode:
    def test_no_layout_changes_it_and_it_is_on_by_itself(self, ran):
        quiet = EXACT | {"record": EXACT["record"] | {"certificate": None}}
        expected = hashes(ran(**quiet))
        assert None not in expected
        for layout in ({"dp": 2, "tp": 2}, {"cp": 2, "order": "zigzag"}):
            data = {"micro_batches": 2 // layout.get("dp", 1)}
            assert hashes(ran(**quiet, layout=layout, data=data)) == expected, layout
        assert hashes(ran(layout={"cp": 2, "order": "zigzag"})) != hashes(ran()), "the ordinary mode fails this test"

    def test_one_bit_in_one_block_changes_it(self, ran, monkeypatch):
        expected = hashes(ran(**EXACT, steps=1))
        plant(monkeypatch, "model.layers.1.mlp.up_proj", place=9, loads=[0])
        assert hashes(ran(**EXACT, steps=1)) != expected
        assert hashes(ran(**EXACT, steps=1)) == expected, "and only there"

    def test_both_must_have_one_to_be_compared_bitwise(self):
        exact, fast = RunSpec.model_validate(BASE).merged(EXACT), RunSpec.model_validate(BASE)
        assert compared_bitwise(exact, exact)
        assert not compared_bitwise(exact, fast)
        assert not compared_bitwise(exact, exact.merged({"record": {"certificate": False}}))


class TestOneAlone:
    def test_hash_sees_names_values_and_unlike_replicas(self):
        one = Certificate({"a": "float32 00", "b": "float32 01"})
        others = [
            Certificate({"a": "float32 00"}),
            Certificate({"a": "float32 00", "c": "float32 01"}),
            Certificate({"a": "float32 00", "b": "bfloat16 01"}),
            Certificate(one.fingerprints, ("b",)),
        ]
        assert len({each.hash for each in (one, *others)}) == 5
        assert [one.differing(other) for other in others] == [["b"], ["b", "c"], ["b"], ["b"]]
        assert one.differing(Certificate(dict(one.fingerprints))) == []


class TestOnDisk:
    @pytest.mark.parametrize(
        "change",
        [
            lambda content: "{",
            lambda content: "[]",
            lambda content: json.dumps({**json.loads(content), "certificate": "0" * 64}),
            lambda content: content.replace("float32 ", "float64 ", 1),
        ],
    )
    def test_a_modified_file_is_refused(self, ran, change):
        run = ran(steps=1)
        file = run.path / "certificates" / "step0000.json"
        file.write_text(change(file.read_text()))
        with pytest.raises(RecordError, match="certificates/step0000"):
            read_certificate(run, 0)

    def test_none_without_a_request(self, ran):
        assert read_certificate(ran(steps=1), 7) is None


WHERE = "record mine: tensors/step0000.gradients"


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 8, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


def norms_of(gradients):
    return {name: float(values.double().norm()) for name, values in gradients.items()}


def problem(check, *arguments):
    """The damage that a check reports, "" if none."""
    try:
        check(*arguments, where=WHERE)
    except RecordError as error:
        return error.parts["found"]
    return ""


def flip(values, at, bit):
    """Another tensor with one bit of one element flipped."""
    bits = values.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    bits.view(-1)[at] ^= 1 << bit
    return bits.view(values.dtype)


class TestCertificate:
    @pytest.fixture
    def certificate(self, gradients):
        return Certificate({f"gradient/{name}": fingerprint_label(values) for name, values in gradients.items()})

    def test_of_the_stored_bits_passes(self, gradients, certificate):
        assert problem(check_certificate, gradients, certificate) == ""

    def test_sees_the_last_bit_of_an_element_that_no_norm_shows(self, gradients, certificate):
        least = int(gradients["c.weight"].abs().argmin())
        damaged = gradients | {"c.weight": flip(gradients["c.weight"], least, 0)}
        assert problem(check_gradients, damaged, norms_of(gradients)) == ""
        result = problem(check_certificate, damaged, certificate)
        assert result.startswith("parameter c.weight has fingerprint float32 ")
        assert ", certified float32 " in result

    def test_sees_another_dtype(self, gradients, certificate):
        stored = {name: values.double() for name, values in gradients.items()}
        assert "a.weight has fingerprint float64" in problem(check_certificate, stored, certificate)

    def test_ignores_differing_replicas(self, gradients, certificate):
        stored = gradients | {"a.weight": gradients["a.weight"] + 1}
        assert "a.weight" in problem(check_certificate, stored, certificate)
        unlike = Certificate(certificate.fingerprints, ("gradient/a.weight",))
        assert problem(check_certificate, stored, unlike) == ""
