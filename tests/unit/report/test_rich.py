"""rich: every noun is drawn by the name of its type, has a text twin, and costs nothing before it is shown."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from tests.helpers.hand_records import make_record
from tests.helpers.proofs import make_proof
from tests.helpers.trials import make_sweep
from workbench.compare.bisect import Bisection
from workbench.compare.certificates import CertificateComparison
from workbench.compare.comparison import Comparison
from workbench.diagnose import diagnose
from workbench.launch.ablation import AblationSpec
from workbench.records.provenance import project_root
from workbench.report import rich
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.bridge import Grid, GridPair
from workbench.sharding.bridge.traffic import Traffic
from workbench.sharding.plan import ShardPlan
from workbench.specs.run import RunSpec
from workbench.systems import explain


@pytest.fixture
def nouns(tmp_path, comparison):
    """One of each."""
    batch = RolloutBatch.from_documents(
        [{"tokens": [5, 7], "loss_mask": [0, 1], "advantages": 0.5, "old_logprobs": [0.0, -1.0]}]
    )
    sweep = make_sweep(tmp_path / "exp", "a")
    ablation = AblationSpec(question="is it?", reference="a", configurations={"a": {"precision": "float64"}})
    traffic = Traffic.of(GridPair(Grid.of(tp=2, dp=1), Grid.of(dp=2)))
    return [
        batch,
        ShardPlan.make("zigzag", num_tokens=8, cp=2),
        traffic,
        RunSpec(),
        ablation,
        *sweep.runs,
        sweep,
        comparison,
        explain("fast_llm", {}, "fast_llm", {"type": "gspo"}),
        make_proof(),
        diagnose(make_record(), make_record(scale=0.5)),
        CertificateComparison("one", "two", 1, tensors=3),
        Bisection("one", "two", None, 1, 59, {}),
    ]


def test_the_list_names_types_that_are_there(nouns):
    assert {(type(noun).__module__, type(noun).__name__) for noun in nouns} == set(rich.DRAWN)


def test_ipython_draws_each_with_a_text_version(nouns):
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    rich.register(shell)
    for noun in nouns:
        bundle, _ = shell.display_formatter.format(noun)
        assert bundle["text/html"] == rich.as_html(noun)
        assert bundle["text/html"].startswith("<div")
        assert bundle["text/plain"] == repr(noun)
        assert not bundle["text/plain"].startswith(("<", "tensor"))
        assert "tensor(" not in bundle["text/plain"]


def test_a_derived_type_is_drawn_like_its_base():
    class OurSpec(RunSpec):
        """With a setting of our own."""

    assert rich.as_html(OurSpec()).startswith('<div class="workbench-rich">')


def test_other_things_are_not_drawn():
    with pytest.raises(TypeError, match="no drawing of a int; there are: RolloutBatch, "):
        rich.as_html(3)


def test_drawn_markup_is_balanced(nouns):
    for noun in nouns:
        open_elements = []

        class Balance(HTMLParser):
            def handle_starttag(self, tag, attributes, stack=open_elements):
                if tag not in ("br", "wbr"):
                    stack.append(tag)

            def handle_endtag(self, tag, stack=open_elements):
                assert stack.pop() == tag

        Balance().feed(rich.as_html(noun))
        assert open_elements == [], type(noun)


def test_registering_imports_nothing_heavy():
    code = (
        "import sys; from IPython.core.interactiveshell import InteractiveShell; "
        "from workbench.report import rich; rich.register(InteractiveShell()); "
        "sys.exit(','.join(m for m in ('torch', 'pydantic', 'matplotlib', 'pandas', 'ipywidgets') "
        "if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project_root())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("shell", "drawn"), [("InteractiveShell.instance()", "<div"), ("None", "RunSpec()")])
def test_importing_the_workbench_in_ipython_is_enough(shell, drawn):
    code = (
        f"from IPython.core.interactiveshell import InteractiveShell; {shell}; import workbench; "
        "bundle, _ = InteractiveShell.instance().display_formatter.format(workbench.RunSpec()); "
        "print(bundle.get('text/html', bundle['text/plain'])[:9])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project_root())
    assert done.stdout.strip().startswith(drawn), done.stderr


def test_comparison_is_the_table_of_verdicts(comparison):
    assert isinstance(comparison, Comparison)
    assert 'class="workbench"' in rich.as_html(comparison)
