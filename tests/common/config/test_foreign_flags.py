"""Flags of SGLang and vLLM: aliases of options, switches without effect, and translations of all others."""

import re
from pathlib import Path
from typing import Any

import pytest

from common.config.cli import CLASSES, parse, resolve
from common.config.foreign_flags import ALIASES, ALWAYS_ON, NO_EQUAL, aliases_of
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import options_of
from common.config.serve import ServeConfig
from common.errors import ConfigError
from scripts.load_tester.config import LoadtestConfig

FLAGS = {found.flag for cls in CLASSES.values() for found in options_of(cls).values()}
OWN = FLAGS | {"--no-" + flag[2:] for flag in FLAGS} | {"--config", "--version", "--help", "-h"}
ALL_ALIASES = [flag for name in ALIASES for flag in aliases_of(name)]
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "flags.md").read_text()


def serve(*words: str) -> ServeConfig:
    return parse(ServeConfig, words, command="serve")


def test_every_alias_leads_to_an_option() -> None:
    assert set(ALIASES) <= {name for cls in CLASSES.values() for name in options_of(cls)}


def test_no_foreign_flag_hides_an_option_or_another_foreign_flag() -> None:
    foreign = [*ALL_ALIASES, *ALWAYS_ON, *NO_EQUAL]
    assert not set(foreign) & OWN
    assert len(foreign) == len(set(foreign))
    assert all(re.fullmatch(r"--?[a-z][a-z0-9-]*", flag) for flag in foreign)


@pytest.mark.parametrize("flag", [*NO_EQUAL, *ALWAYS_ON])
def test_a_translation_names_only_options_that_exist(flag: str) -> None:
    sentence = (NO_EQUAL | ALWAYS_ON)[flag]
    assert set(re.findall(r"--[a-z][a-z0-9-]*", sentence)) <= OWN


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--model-path", "org/model"], "model", "org/model"),
        (["--max-model-len=4096"], "context_length", 4096),
        (["--block-size", "32"], "page_size", 32),
        (["--tensor-parallel-size", "2"], "tp", 2),
        (["-tp", "2"], "tp", 2),
        (["-tp=2"], "tp", 2),
        (["--max-num-seqs", "8"], "max_running_requests", 8),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--disable-radix-cache", "--enable-prefix-caching"], "disable_radix_cache", False),
        (["--disaggregation-transfer-backend", "nixl"], "transport", "nixl"),
        (["--block-size", "32", "--page-size", "64"], "page_size", 64),
    ],
)
def test_an_alias_sets_its_option(words: list[str], name: str, value: Any) -> None:
    assert getattr(serve(*words), name) == value


def test_every_alias_is_taken_by_some_command_that_has_its_option() -> None:
    values = {"model": "m", "transport": "tcp", "hf_overrides": "{}"}
    for name in ALIASES:
        for flag in aliases_of(name):
            words = [flag] if options_of(ServeConfig)[name].kind is bool else [flag, values.get(name, "64")]
            words += ["--tls-cert=c", "--tls-key=k"] if name.startswith("tls_") else []
            serve(*words)


def test_an_error_names_the_alias_that_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--max-model-len must be a whole number, not '1k'$"):
        serve("--max-model-len", "1k")
    with pytest.raises(
        ConfigError, match=r"^--disaggregation-transfer-backend must be one of auto, shm, .* 'mooncake'$"
    ):
        serve("--disaggregation-transfer-backend=mooncake")


def test_the_environment_and_the_file_know_no_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("block-size = 32\n")
    with pytest.raises(ConfigError, match=r"block-size in .* is not a known option"):
        serve("--config", str(file))
    monkeypatch.setenv("BATON_BLOCK_SIZE", "32")
    with pytest.raises(ConfigError, match="BATON_BLOCK_SIZE is not a known option"):
        serve()


@pytest.mark.parametrize("command", CLASSES)
def test_switches_for_what_baton_does_always_are_accepted_by_every_command(command: str) -> None:
    cls = CLASSES[command]
    assert parse(cls, [*ALWAYS_ON], command=command) == parse(cls, [], command=command)


@pytest.mark.parametrize("flag", NO_EQUAL)
def test_a_flag_without_an_equal_is_refused_with_its_translation(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        serve(flag)
    assert str(refused.value) == f"{flag} of SGLang or vLLM has no equal in Baton: {NO_EQUAL[flag]}"


def test_the_refusal_of_quantization_names_the_option_that_rounds_weights() -> None:
    with pytest.raises(ConfigError, match=r"--weight-dtype int8 or int4 rounds others on CPUs$"):
        serve("--quantization", "int8")


@pytest.mark.parametrize("words", [["--seed=1"], ["--seed", "1"], ["--port", "1", "--seed", "1", "--prot", "2"]])
def test_a_flag_without_an_equal_is_recognised_with_a_value_and_among_others(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--seed of SGLang or vLLM has no equal"):
        serve(*words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--max-num-seq", "8"], "--max-num-seq is not a known option; did you mean --max-num-seqs?"),
        (["--pagesize=8"], "--pagesize is not a known option; did you mean --page-size?"),
        (["-x"], "-x is not a known option; --help lists all options"),
        (["--override-pooler-config=x"], "--override-pooler-config is not a known option; --help lists all options"),
        (["--zzz"], "--zzz is not a known option; --help lists all options"),
        (
            ["--mem-fraction-statik", "0.8"],
            "--mem-fraction-statik is not a known option; --mem-fraction-static of SGLang or vLLM has no equal",
        ),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_closest_one(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        serve(*words)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--inputlen=8", "--inputlen is not a known option; did you mean --input-len?"),
        ("--nope", "--nope is not a known option; --help lists all options"),
    ],
)
def test_a_command_that_serves_nothing_refuses_a_flag_with_the_same_words(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        parse(LoadtestConfig, [word], command="loadtest")


def test_a_flag_of_another_command_is_answered_with_the_commands_that_take_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^--block-size is not an option of this command, but of serve, prefill, decode$"
    ):
        parse(GatewayConfig, ["--block-size", "32"], command="gateway")
    with pytest.raises(ConfigError, match=r"^--retraction-policy is not an option of this command, but of serve, pre"):
        parse(GatewayConfig, ["--retraction-policy", "priority"], command="gateway")
    with pytest.raises(ConfigError, match=r"^--port is not an option of this command, but of serve, gateway$"):
        parse(NodeConfig, ["--port", "1"], command="decode")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_shows_aliases_beside_their_flag(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        resolve(NodeConfig, [word], command="decode")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--page-size, --block-size INT Tokens per KV page" in shown
    assert "--enable-metrics" not in shown


def test_the_page_lists_every_flag_once() -> None:
    section = {heading: part for heading, _, part in (part.partition("\n") for part in PAGE.split("\n## "))}
    rows = re.findall(r"^\| `(--[^|]*) \| `(--[a-z-]+)` \|$", section["Aliases"], re.M)
    listed = {alias: flag for aliases, flag in rows for alias in re.findall(r"--?[a-z-]+", aliases)}
    assert listed == {alias: "--" + name.replace("_", "-") for name in ALIASES for alias in aliases_of(name)}
    for heading, flags in (("Switches without effect", ALWAYS_ON), ("Flags without an equivalent", NO_EQUAL)):
        first_cells = re.findall(r"^\| (`--[^|]*) \|", section[heading], re.M)
        assert sorted(re.findall(r"--?[a-z][a-z0-9-]+", " ".join(first_cells))) == sorted(flags)
