"""Two runs by their certificates, synthetic: the first differing step, tensor and element, and missing entries."""

import math

import pytest
import torch

from workbench.compare.align import Subject, compare_runs
from workbench.compare.certificates import compare_certificates
from workbench.errors import RecordError
from workbench.records.certificate import Certificate, write_certificate
from workbench.records.directory import RunDirectory
from workbench.reproducible.fingerprints import fingerprint
from workbench.specs.run import RunSpec

EXACT = {"reproducible": {"block_tokens": 8}}


def tensors(**changed):
    """The certificate entries of one step, under their real names."""
    drawn = torch.Generator().manual_seed(0)
    made = {
        "logprobs": torch.randn(6, generator=drawn),
        "loss/total/sum": torch.tensor(0.5, dtype=torch.float64),
        "gradient/head": torch.randn(3, 2, generator=drawn),
        "gradient/embedding": torch.randn(4, generator=drawn),
        "weight/embedding": torch.randn(4, generator=drawn),
        "weight/head": torch.randn(3, 2, generator=drawn),
    }
    return made | {name.replace("__", "/"): value for name, value in changed.items()}


def ulp(name, place):
    value = tensors()[name].clone()
    value[place] = torch.nextafter(value[place], torch.tensor(9.0, dtype=value.dtype))
    return {name.replace("/", "__"): value}


def run(root, name, steps, *, kept=("gradients", "tokens"), certified=True, **settings):
    spec = RunSpec(
        steps=len(steps),
        record={
            "certificate": certified,
            "gradients": "full" if "gradients" in kept else "none",
            "tokens": "tokens" in kept,
        },
        **settings,
    )
    directory = RunDirectory.create(root, name, spec)
    directory.set_state("running")
    for number, text in enumerate(steps):
        unlike, numbers = text.pop("unlike", ()), text.pop("numbers", {})
        line = {"step": number, "loss/total/sum": float(text["loss/total/sum"]), "gradient/norm/global": 1.0} | numbers
        if "gradients" in kept:
            directory.write_tensors(
                f"step{number:04d}.gradients",
                {name.removeprefix("gradient/"): value for name, value in text.items() if name.startswith("gradient/")},
            )
        if "tokens" in kept:
            flags = {name: torch.zeros(6, dtype=torch.bool) for name in ("clipped", "would_clip", "trained")}
            directory.write_tensors(
                f"step{number:04d}.tokens",
                {"policy_logprobs": text["logprobs"], "old_logprobs": text["logprobs"], **flags},
            )
        if certified:
            certificate = Certificate(
                {name: f"{value.dtype} {fingerprint(value):016x}" for name, value in text.items()}, unlike
            )
            write_certificate(directory, number, certificate)
            line["certificate"] = certificate.hash
        directory.append_step(line)
    directory.set_state("succeeded")
    return directory


@pytest.fixture
def compared(tmp_path):
    def compare(*mine, reference=None, **settings):
        return compare_certificates(
            run(tmp_path, "mine", list(mine), **settings), run(tmp_path, "ref", reference or [tensors() for _ in mine])
        )

    return compare


class TestTheFirstThatDiffers:
    def test_nothing_does(self, compared):
        result = compared(tensors(), tensors())
        assert result.equal
        assert str(result) == (
            "mine against ref: the certificate of all 2 steps is the reference's: loss, "
            "log-probabilities, gradients and weights are the same bits"
        )

    def test_is_named_with_its_element(self, compared):
        wrong = tensors(**ulp("gradient/head", (1, 1)), **ulp("weight/head", (0, 0)), **ulp("gradient/embedding", 2))
        result = compared(tensors(), wrong)
        assert (result.step, result.differing) == (1, ("gradient/head", "gradient/embedding", "weight/head"))
        assert result.element.place == (1, 1)
        assert result.element.value == float(wrong["gradient/head"][1, 1]) != result.element.reference
        assert "step 1: certificates part at gradient/head and 2 more of 6 tensors; element [1, 1] " in result.why
        assert result.why.endswith("the first of 1 in 6")

    def test_may_be_a_log_probability_or_the_loss(self, compared):
        assert compared(tensors(**ulp("logprobs", 4))).element.place == (4,)
        result = compared(tensors(**ulp("loss/total/sum", ())))
        assert (result.element.value, result.element.reference) == (0.5000000000000001, 0.5)
        assert result.why.endswith("0.5000000000000001 against 0.5")

    def test_sign_of_zero_counts(self, compared):
        zero, minus = torch.zeros(6), torch.zeros(6)
        minus[3] = -0.0
        result = compared(tensors(logprobs=minus), reference=[tensors(logprobs=zero)])
        assert (result.element.place, str(result.element).split(",")[0]) == ((3,), "element [3] -0.0 against 0.0")

    def test_has_no_element_if_none_was_recorded(self, compared):
        assert compared(tensors(**ulp("weight/head", (0, 0)))).element is None
        assert compared(tensors(**ulp("gradient/head", (0, 0))), kept=()).element is None

    def test_replicas_that_differ_are_never_equal(self, compared):
        wrong = tensors() | {"unlike": ("weight/head",)}
        result = compared(wrong, reference=[dict(wrong)])
        assert not result.equal
        assert "ranks hold different replicas of weight/head" in result.why


COUNTED = {
    "evidence/documents/sum": 4.0,
    "evidence/gradient_documents/sum": 1.0,
    "evidence/trained_tokens/sum": 6.0,
    "evidence/gradient_tokens/sum": 2.0,
}


class TestVerdicts:
    """The same bits are equal only if something was trained, and if the reference is finite."""

    def judged(self, compared, mine, reference=None):
        """The same tensors in both, with these numbers in the step records."""
        return compared(tensors() | {"numbers": mine}, reference=[tensors() | {"numbers": reference or mine}])

    def test_counts_are_stated_and_equal_is_equal(self, compared):
        verdict = self.judged(compared, COUNTED)
        assert (verdict.verdict, verdict.equal, verdict.vacuous) == ("equal", True, "")
        assert verdict.evidence.gradient_documents == 1
        assert verdict.evidence.warnings

    @pytest.mark.parametrize(
        ("numbers", "reason"),
        [
            (COUNTED | {"evidence/trained_tokens/sum": 0.0}, "no token is trained"),
            (
                COUNTED | {"evidence/gradient_documents/sum": 0.0, "evidence/gradient_tokens/sum": 0.0},
                "no document has a gradient",
            ),
            (COUNTED | {"gradient/norm/global": 0.0}, "every gradient is zero"),
            ({"gradient/norm/global": 0.0}, "every gradient is zero"),
        ],
    )
    def test_the_same_bits_of_nothing_are_vacuous(self, compared, numbers, reason):
        verdict = self.judged(compared, numbers)
        assert (verdict.verdict, verdict.equal) == ("vacuous", True)
        assert verdict.vacuous.startswith(reason)
        assert verdict.why.startswith(f"vacuous: {reason}")
        assert verdict.why.endswith("so the same certificate of the step proves nothing")

    @pytest.mark.parametrize("numbers", [{"gradient/norm/global": math.nan}, {"loss/total/sum": math.inf}])
    def test_a_reference_that_is_not_finite_is_unsound(self, compared, numbers):
        verdict = self.judged(compared, numbers)
        assert (verdict.verdict, verdict.equal) == ("unsound baseline", True)
        assert verdict.why.startswith("unsound baseline (step 0: the ")
        assert self.judged(compared, numbers, COUNTED).verdict == "equal"

    def test_different_bits_before_and_after_the_baseline_diverges(self, tmp_path):
        fine, broken = {"numbers": COUNTED}, {"numbers": COUNTED | {"loss/total/sum": math.nan}}
        wrong = ulp("gradient/head", (0, 0))
        reference = run(tmp_path, "ref", [tensors() | fine, tensors() | broken])
        early = run(tmp_path, "early", [tensors(**wrong) | fine, tensors() | fine])
        late = run(tmp_path, "late", [tensors() | fine, tensors(**wrong) | fine])
        assert compare_certificates(early, reference).verdict == "different"
        assert compare_certificates(late, reference).verdict == "unsound baseline"

    def test_a_run_that_trained_nothing_is_vacuous_whichever_of_the_two_it_is(self, compared):
        nothing = COUNTED | {"evidence/trained_tokens/sum": 0.0, "evidence/gradient_tokens/sum": 0.0}
        assert self.judged(compared, nothing, COUNTED).verdict == "vacuous"
        assert self.judged(compared, COUNTED, nothing).verdict == "vacuous"


class TestWhatIsNotThere:
    def test_no_certificates_no_comparison(self, compared):
        assert compared(tensors(), certified=False) is None

    def test_a_hash_without_its_certificate_is_refused(self, tmp_path):
        one = run(tmp_path, "one", [tensors()])
        (one.path / "certificates" / "step0000.json").unlink()
        with pytest.raises(RecordError, match="no certificate next to its hash"):
            compare_certificates(one, one)


class TestInAnAblation:
    """Verdicts by bits: no ground truth, no gradients on disk."""

    @pytest.fixture
    def judged(self, tmp_path):
        def judge(mine, *, kept=(), truth="", **settings):
            subjects = [
                Subject("ref", run(tmp_path, "ref", [tensors(), tensors()], kept=kept, **settings)),
                Subject("mine", run(tmp_path, "mine", mine, kept=kept, **settings), "ref", truth),
            ]
            return compare_runs(subjects, experiment="demo", question="?")["mine"]

        return judge

    def test_the_same_bits_are_equal(self, judged):
        verdict = judged([tensors(), tensors()], **EXACT)
        assert (verdict.verdict, verdict.parameters) == ("equal", [])
        assert "the same bits" in verdict.why

    def test_one_bit_is_different(self, judged):
        verdict = judged([tensors(), tensors(**ulp("gradient/head", (2, 0)))], kept=("gradients", "tokens"), **EXACT)
        assert (verdict.verdict, verdict.first_step, verdict.first_parameter) == ("different", 1, "head")
        assert [(row.step, row.parameter) for row in verdict.parameters if not row.within] == [(1, "head")]
        assert "element [2, 0]" in verdict.why

    def test_a_weight_alone_is_different(self, judged):
        verdict = judged([tensors(**ulp("weight/head", (2, 0))), tensors()], **EXACT)
        assert (verdict.verdict, verdict.first_step, verdict.first_parameter) == ("different", 0, None)

    def test_in_the_ordinary_mode_equal_bits_need_no_truth_either(self, judged):
        assert judged([tensors(), tensors()]).verdict == "equal"
        verdict = judged([tensors(), tensors(**ulp("weight/head", (0, 0)))])
        assert verdict.verdict == "failed"
        assert "float64 truth" in verdict.why

    def test_budgets_decide_in_the_ordinary_mode_and_the_certificate_informs(self, judged):
        verdict = judged(
            [tensors(), tensors(**ulp("weight/head", (0, 0)))], kept=("gradients", "tokens"), precision="float64"
        )
        assert verdict.verdict == "equal"
        assert verdict.why.endswith("certificates part at weight/head, alone of 6 tensors")
