"""Which control groups limit this process."""

import pytest

from common.system.control_groups import control_groups


@pytest.mark.parametrize("controller", ["cpu", "memory"])
def test_groups_of_this_process_are_looked_at_up_to_the_root(controller: str) -> None:
    folders = list(control_groups(controller))
    assert all(folder.is_relative_to("/sys/fs/cgroup") for folder in folders)
