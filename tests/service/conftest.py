"""Shows the ends of the logs of the services that are running when a test fails."""

from collections.abc import Generator

import pytest
from support.service.service import NUM_LAST_LINES, OPEN


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [(f"logs in {service.logs}", service.log(NUM_LAST_LINES)) for service in OPEN]
    return report
