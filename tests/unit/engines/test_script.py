import sys

import pytest

from workbench.engines.case import EngineCase
from workbench.engines.proof import DOCUMENTS
from workbench.engines.script import Script, last_error

DRIVER = """
import torch
from workbench.engines.case import EngineStep
from workbench.engines.driver import options, serve

def run(case):
    if case.padding:
        raise SystemExit("out of memory")
    size = float(options()["size"])
    return EngineStep({"a": torch.zeros(1)}, {"a": torch.full((1,), size)}, (float(case.each),))

serve(run)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    return Script(sys.executable, tmp_path / "driver.py", {"size": "2"})


def test_a_script_answers_in_the_order_of_the_cases_and_one_that_ends_says_why(script):
    cases = [EngineCase(DOCUMENTS, each=8), EngineCase(DOCUMENTS, each=4), EngineCase(DOCUMENTS, padding=1)]
    steps = script(cases)
    assert [step.losses for step in steps] == [(8.0,), (4.0,), ()]
    assert steps[0].update["a"].tolist() == [-2.0]
    assert steps[2].error == "the driver ended with 1: out of memory"


def test_the_last_error_of_an_output_is_named():
    assert last_error("Traceback\nValueError: wrong size\nW1125 closing\n") == "ValueError: wrong size"
    assert last_error("") == "no output"
