"""The page of the precision record: its rows, its sentences, and its parts."""

import re

import pytest

from experiments.precision import page


@pytest.fixture(params=page.PAGES)
def record(request):
    return page.load_record(page.RECORD.with_name(f"{request.param}.json"))


@pytest.mark.parametrize(("record_name", "page_name"), page.PAGES.items())
def test_a_saved_page_is_that_of_its_record(record_name, page_name):
    shown = page.page(page.load_record(page.RECORD.with_name(f"{record_name}.json")))
    assert page.RECORD.with_name(f"{page_name}.html").read_text() == shown


def test_rows_are_in_units_of_bf16_mixed(record):
    lines = {line[0]: line[1:] for line in page.rows(record)}
    assert lines["bf16_mixed"][:4] == ["1.0"] * 4
    assert "float64" not in lines
    assert lines["bf16_pure"][page.COLUMNS.index("unmoved")] in ("98 %", "100 %")
    assert lines["mxfp8"][-1].endswith("*"), "no GPU and no CPU of these records has it"


def test_the_answer_has_the_numbers_of_the_record(record):
    [lost, steps] = re.search(r"lose (\d+) % of the updates of (\d+) steps", page.answer(record)).groups()
    assert int(lost) >= 98
    assert int(steps) == record["steps"]


def test_what_did_not_run_is_named(record):
    assert "Left out" not in page.answer(record)
    missing = dict(record) | {"choices": dict(record["choices"]) | {"tf32": {"left_out": "no time: 1 minutes"}}}
    assert page.answer(missing).endswith("Left out: tf32.")
    assert "no time: 1 minutes" in page.page(missing)


def test_rounding_explains_no_error_far_above_that_of_bf16_mixed():
    """Without a loss scale, gradients of the 0.6 B model underflow on the way back."""
    record = page.load_record(page.RECORD.with_name("qwen3_0.6b.json"))
    assert "not explained" not in str(page._worst(record))
    for worst in record["choices"]["fp16, scale 1"]["worst_parameters"]:
        worst["cause"] = "rounding"
    assert str(page._worst(record)).count("not explained") == 3


def test_every_choice_is_drawn_once(record):
    [axes] = page.error_against_time(record).axes
    looks = [(line.get_marker(), line.get_color()) for line in axes.lines]
    assert len(set(looks)) == len(looks) == len(page.measured(record)) - 1
