"""Hosts as network namespaces, for tests."""

from collections.abc import Sequence

import pytest

from scripts.chaos_harness.hosts import Hosts, Link, NoNamespaces


def make_hosts(names: Sequence[str], link: Link | None = None) -> Hosts:
    """The hosts; skips the test on a machine that cannot make them."""
    try:
        return Hosts(names, link)
    except NoNamespaces as error:
        pytest.skip(str(error))
