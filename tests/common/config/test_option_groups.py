"""``--help`` shows every option once, in a group, within 80 columns."""

import re

import pytest

from common.config.cli import CLASSES, resolve
from common.config.option_groups import GROUPS, USUAL, sections
from common.config.options import options_of
from scripts.chaos_harness.config import ChaosConfig
from scripts.load_tester.config import LoadtestConfig
from scripts.simulator.config import SimulateConfig

COMMANDS = {**CLASSES, "loadtest": LoadtestConfig, "simulate": SimulateConfig, "chaos": ChaosConfig}


def test_every_option_is_in_exactly_one_group_and_every_command_has_ten_usual_ones():
    assert set(GROUPS) == set(USUAL) == set(COMMANDS)
    for command, cls in COMMANDS.items():
        grouped = [name for members in GROUPS[command].values() for name in members]
        assert len(grouped) == len(set(grouped)), command
        assert set(options_of(cls)) <= set(grouped), f"{command}: add the option to common/config/option_groups.py"
        assert len(set(USUAL[command])) == 10
        assert set(USUAL[command]) <= set(options_of(cls)), command


def test_no_group_names_an_option_that_no_command_has():
    for groups in GROUPS.values():
        known = {name for command, cls in COMMANDS.items() if GROUPS[command] is groups for name in options_of(cls)}
        known |= set(options_of(LoadtestConfig)) | {name for cls in CLASSES.values() for name in options_of(cls)}
        assert {name for members in groups.values() for name in members} <= known


def test_sections_begin_with_the_usual_options_and_leave_none_out():
    found = sections("decode", ["kv_checksum", "model", "brand_new", "gateway"])
    assert found == [
        ("Usual options", ["model", "gateway"]),
        ("Network", ["kv_checksum"]),
        ("Other options", ["brand_new"]),
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_once_and_fits_into_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        resolve(COMMANDS[command], ["--help"], command=command, help="What it does.")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.index("Usual options:") < shown.index("Load:" if command in ("loadtest", "chaos") else "Scheduling:")
    for found in options_of(COMMANDS[command]).values():
        flag = f"--[no-]{found.flag[2:]}" if found.kind is bool else found.flag
        assert len(re.findall(rf"^  {re.escape(flag)}(?=[ ,\n])", shown, re.M)) == 1, flag
    assert not re.findall(r"--[a-z-]*-\n", shown), "a line breaks within a flag"
