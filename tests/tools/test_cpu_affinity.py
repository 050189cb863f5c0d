"""Division of cores among nodes."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.system.cpu_cores import usable_cores
from scripts.serving.cpu_affinity import Share, divide

TWO = [(0,), (1,)]


def test_two_nodes_on_two_cores_get_one_each():
    assert divide(TWO, 2) == [Share(1, (0,)), Share(1, (1,))]


def test_the_first_nodes_get_the_remainder():
    assert divide([(i,) for i in range(8)], 3) == [Share(3, (0, 1, 2)), Share(3, (3, 4, 5)), Share(2, (6, 7))]


def test_hardware_threads_of_a_core_stay_together_and_count_once():
    assert divide([(0, 4), (1, 5), (2, 6), (3, 7)], 2) == [Share(2, (0, 4, 1, 5)), Share(2, (2, 6, 3, 7))]


def test_more_nodes_than_cores_get_one_thread_each_and_no_pinning():
    assert divide(TWO, 3) == [Share(1)] * 3


def test_given_thread_counts_are_kept_and_pinned_where_they_fit():
    assert divide([(i,) for i in range(4)], 2, 1) == [Share(1, (0, 1)), Share(1, (2, 3))]
    assert divide(TWO, 3, 1) == [Share(1)] * 3


@pytest.mark.parametrize(("num_nodes", "num_threads"), [(2, 2), (3, 2), (1, 3)])
def test_more_threads_than_a_nodes_share_of_the_cores_are_refused(num_nodes, num_threads):
    most = {1: 2, 2: 1, 3: 1}[num_nodes]
    with pytest.raises(ConfigError, match=rf"--threads {num_threads}: the share of each of .*; give at most {most}"):
        divide(TWO, num_nodes, num_threads)


@given(st.integers(1, 64), st.integers(1, 32), st.none() | st.integers(1, 8))
def test_every_core_is_assigned_exactly_once(num_cores, num_nodes, num_threads):
    cores = [(i,) for i in range(num_cores)]
    if (num_threads or 1) > max(1, num_cores // num_nodes):
        with pytest.raises(ConfigError):
            divide(cores, num_nodes, num_threads)
        return
    shares = divide(cores, num_nodes, num_threads)
    cpus = [cpu for share in shares for cpu in share.cpus]
    assert len(shares) == num_nodes
    assert cpus in ([], list(range(num_cores)))
    assert all(share.num_threads <= len(share.cpus) for share in shares if share.cpus)


def test_usable_cores_are_within_the_affinity_of_this_process():
    cpus = [cpu for core in usable_cores() for cpu in core]
    assert cpus
    assert set(cpus) <= os.sched_getaffinity(0)
