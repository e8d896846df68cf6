"""Where options of schedulers come from; `test_jobs` checks them, with the requests that they change."""

from __future__ import annotations

from workbench.launch import options


def test_the_runner_is_one_for_the_process_and_knows_every_scheduler():
    assert options.runner() is options.runner()
    assert all(options.runner().scheduler_run_opts(name) is not None for name in options.SCHEDULERS)
