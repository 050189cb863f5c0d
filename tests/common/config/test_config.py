"""Options from flags, environment and file, in this order of precedence, and the refusal of invalid ones."""

import contextlib
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from common.config.cli import CLASSES, parse, resolve
from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.config.options import options_of, to_flags
from common.config.serve import ServeConfig
from common.errors import ConfigError
from common.wire.address import host_and_port, is_loopback


def gateway(*words: str) -> GatewayConfig:
    return parse(GatewayConfig, words, command="gateway")


def node(*words: str, role: str = "prefill") -> NodeConfig:
    return parse(NodeConfig, words, command=role)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "baton.toml"


def test_without_any_setting_the_small_model_is_served_on_loopback():
    config = gateway()
    assert (config.host, config.port, config.control_port, config.served_name) == (
        "127.0.0.1",
        8000,
        8001,
        "baton-small",
    )


def test_a_model_below_the_home_is_served_as_its_folder_is_called(file, monkeypatch):
    (file.parent / "my-model").mkdir()
    monkeypatch.setenv("HOME", str(file.parent))
    file.write_text('model = "~/my-model"\n')
    assert gateway("--config", str(file)).served_name == "my-model"
    with pytest.raises(ConfigError, match="--revision is for hub models, but --model ~/my-model is a folder"):
        gateway("--config", str(file), "--revision", "main")


def test_the_command_line_beats_the_environment_which_beats_the_file(file, monkeypatch):
    file.write_text("port = 1\nmax-body-bytes = 2000\ncontrol_port = 3\n")
    monkeypatch.setenv("BATON_PORT", "11")
    monkeypatch.setenv("BATON_MAX_BODY_BYTES", "12000")
    config = gateway("--config", str(file), "--port", "21")
    assert (config.port, config.max_body_bytes, config.control_port) == (21, 12000, 3)


def test_the_file_can_be_named_by_the_environment(file, monkeypatch):
    file.write_text("port = 7\n")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    assert gateway().port == 7


def test_one_file_serves_several_commands_by_their_tables(file):
    file.write_text('log-level = "debug"\n[gateway]\nport = 5\n[decode]\npage-size = 32\n')
    words = ("--config", str(file))
    assert (gateway(*words).log_level, gateway(*words).port) == ("debug", 5)
    assert [node(*words, role=role).page_size for role in ("prefill", "decode")] == [16, 32]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prot = 1", "prot in .* is not a known option; did you mean port"),
        ("page-size = 8", r"page-size in .* is not an option of gateway, but of serve, prefill, decode: put it"),
        ('port = "many"', "port in .* must be a whole number, not 'many'"),
        ("port = true", "port in .* must be a whole number, not True"),
        ("[gatway]\nport = 1", r"\[gatway\] in .* is not a command"),
        ("port = ", "is not valid TOML"),
        ("allowed-hosts = " + "[" * 5_000, "has a number that is too long, or is nested too deeply"),
        ("port = " + "1" * 5_000, "has a number that is too long, or is nested too deeply"),
        ("node-timeout = " + "1" * 400, "has an integer of more than 64 bits, which TOML forbids"),
        ("[serve]\nallowed-hosts = [0x" + "f" * 5_000 + "]", "has an integer of more than 64 bits, which TOML forbids"),
        (
            "control-port = 1\ncontrol_port = 2",
            "control-port and control_port in .* are the same option; leave one out",
        ),
        (
            "prefill = 2\n[prefill]\nport = 1",
            r"^prefill in .* is a key .* and the table \[prefill\]: .* such as \[serve\]",
        ),
        ("prefill = 2", "^prefill in .* must be a string or a list of strings, not 2$"),
        ("[gateway]\napi_key = 'a'\napi-key = 'b'", "api_key and api-key in .* are the same option; leave one out"),
    ],
)
def test_a_mistake_in_a_file_is_refused_by_key(file, content, sentence):
    file.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        gateway("--config", str(file))


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"^--config /nowhere cannot be read: No such file or directory$"):
        gateway("--config", "/nowhere")


def test_a_misspelt_variable_is_refused_but_not_one_of_another_command(monkeypatch):
    monkeypatch.setenv("BATON_WORKERS", "2")
    gateway()
    monkeypatch.setenv("BATON_PROT", "2")
    with pytest.raises(ConfigError, match="BATON_PROT is not a known option; did you mean BATON_PORT"):
        gateway()
    monkeypatch.delenv("BATON_PROT")
    monkeypatch.setenv("BATON_FOO", "2")
    with pytest.raises(ConfigError, match=r"BATON_FOO is not a known option$"):  # the prefix resembles nothing
        gateway()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port", "many"], "--port must be a whole number, not 'many'"),
        (["--port", "65536"], "--port must be at most 65535, not 65536"),
        (["--port", "-1"], "--port must be at least 0, not -1"),
        (["--request-timeout", "nan"], "--request-timeout must be a finite number"),
        (["--port", "9" * 400], "--port must be at most 65535"),
        (["--request-timeout", "0"], "--request-timeout must be at least 0.001"),
        (["--log-level", "loud"], "--log-level must be one of debug, info, warning, error, not 'loud'"),
        (["--prot", "1"], "--prot is not a known option; did you mean --port\\?"),
        (["stray"], r"unexpected extra argument \(stray\); give a model as --model"),
        (["--heartbeat-interval", "20"], "--node-timeout must be at least twice --heartbeat-interval"),
        (["--heartbeat-timeout", "20"], "--heartbeat-timeout has another name now: give --node-timeout"),
        (["--port", "8001"], "--port and --control-port are both 8001"),
        (["--control-host", "0.0.0.0"], "--control-host 0.0.0.0 can be reached from other machines.*--insecure"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached.* set --api-key, or .*--insecure"),
        (["--default-priority-value", "2147483648"], "--default-priority-value must be at most 2147483647, not 2"),
        (["--api-key", ""], "--api-key is empty; give a value, or leave it out"),
        (["--api-key", "k\n"], "--api-key has a line break, or a space at its beginning or end"),
        (["--admin-api-key", " k"], "--admin-api-key has a line break, or a space at its beginning or end"),
    ],
)
def test_an_impossible_gateway_is_refused_by_flag(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        gateway(*words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--page-size", "0"], "--page-size must be at least 1"),
        (["--node-timeout", "1e9"], "--node-timeout must be at most 86400, not 1000000000.0"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        (["--schedule-policy", "best"], "--schedule-policy best is unknown"),
        (["--chunked-prefill-size", "0"], "--chunked-prefill-size 0 would compute nothing"),
        (["--chunked-prefill-size", "8"], "--chunked-prefill-size 8 is less than a page; give at least --page-size 16"),
        (["--max-total-tokens", "15"], "--max-total-tokens 15 is less than a page"),
        (["--gateway", "here"], "--gateway must be HOST:PORT, not 'here'"),
        (["--advertise-host", "10.0.0.1"], "--advertise-host 10.0.0.1 can be reached.*--insecure"),
        (
            ["--transport", "smoke"],
            "--transport must be one of auto, shm, cuda-ipc, tcp, nixl, gloo, nccl, not 'smoke'",
        ),
        (["--transport", "inprocess"], "--transport must be one of auto, .*, nccl, not 'inprocess'"),
        (["--data-interface", "10.0.0.1"], "--data-interface 10.0.0.1 can be reached.*--cluster-key"),
        (["--advertise-host", "10.0.0.1", "--keys", "k"], "--advertise-host 10.0.0.1 can be reached.*--cluster-key"),
        (["--revision", "main", "--model", "/"], "--revision is for hub models"),
        (["--tp", "0"], "--tp must be at least 1"),
        (
            ["--weight-dtype", "int8", "--device", "cuda"],
            "--weight-dtype int8 runs on CPUs only so far; add --device cpu",
        ),
        (["--model-impl", "vllm"], "--model-impl must be one of auto, native, transformers, not 'vllm'"),
        (["--model-impl", "native", "--trust-remote-code"], "--trust-remote-code has no effect with --model-impl n"),
        (["--hf-overrides", "{'a': 1}"], "--hf-overrides: not JSON"),
        (["--hf-overrides", "[]"], "--hf-overrides must be a JSON object"),
        (["--max-loaded-loras", "9"], "--max-loaded-loras has no effect without --lora or --lora-dir"),
        (["--max-lora-rank", "8"], "--max-lora-rank has no effect without --lora or --lora-dir"),
        (["--nixl-backend", "OTHER", "--transport", "tcp"], "--nixl-backend has no effect with --transport tcp"),
        (["--name", "n" * 257], "--name has 257 characters; give at most 256"),
    ],
)
def test_an_impossible_node_is_refused_by_flag(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        node(*words)


def test_reachable_addresses_need_insecure_or_a_key():
    assert gateway("--control-host", "0.0.0.0", "--host", "0.0.0.0", "--insecure").insecure
    assert gateway("--host", "0.0.0.0", "--api-key", "k").host == "0.0.0.0"
    assert node("--advertise-host", "10.0.0.1", "--insecure").advertise_host == "10.0.0.1"
    assert node("--advertise-host", "10.0.0.1", "--keys", "k", "--cluster-key", "c").data_host == "10.0.0.1"
    assert node("--advertise-host", "10.0.0.1", "--keys", "k", "--data-interface", "127.0.0.1").keys == "k"


@pytest.mark.parametrize("flag", ["--advertise-host", "--data-interface"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_node_does_not_tell_others_an_address_that_means_all_of_its_own(flag, host):
    with pytest.raises(ConfigError, match=f"{flag} {host} means every address of this machine: give the one"):
        node(flag, host, "--insecure")


def test_nixl_tells_the_addresses_of_a_node_itself():
    assert node("--data-interface", "0.0.0.0", "--transport", "nixl", "--insecure").data_host == "0.0.0.0"


def test_where_a_node_serves_its_metrics_can_be_set():
    assert (node().http_host, node().http_port) == ("127.0.0.1", 0)
    assert node("--http-port", "none").http_port is None
    assert (
        node("--http-host", "10.0.0.1", "--http-port", "9100").http_port == 9100
    )  # it shows no prompt, and keys stay on
    for words in (("--http-host", "10.0.0.1"), ("--health-timeout", "60")):
        with pytest.raises(ConfigError, match=f"{words[0]} has no effect with --http-port none; leave one out"):
            node(*words, "--http-port", "none")
    with pytest.raises(ConfigError, match="--http-port must be a whole number"):
        node("--http-port", "off")
    with pytest.raises(ConfigError, match="--http-port 65534 is too high: the last node would get port 65536"):
        ServeConfig(http_port=65534, prefill=1, decode=2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_takes_the_options_of_both_roles_since_it_may_change_its_own(role):
    config = node("--data-port", "9", "--data-interface", "127.0.0.2", role=role)
    assert (config.data_port, config.data_host) == (9, "127.0.0.2")


def test_only_a_gateway_may_have_no_queue_since_a_node_starts_requests_from_its_own():
    assert gateway("--max-queued-requests", "0").max_queued_requests == 0
    with pytest.raises(ConfigError, match="--max-queued-requests must be at least 1, not 0"):
        node("--max-queued-requests", "0")
    with pytest.raises(ConfigError, match="--max-queued-requests 0 would make nodes refuse every request"):
        ServeConfig(max_queued_requests=0)


def test_switches_can_be_turned_off_again(monkeypatch):
    monkeypatch.setenv("BATON_DISABLE_RADIX_CACHE", "yes")
    assert node().disable_radix_cache
    assert not node("--no-disable-radix-cache").disable_radix_cache


def test_the_value_none_removes_a_limit(monkeypatch):
    monkeypatch.setenv("BATON_MAX_QUEUED_REQUESTS", "5")
    assert node().max_queued_requests == 5
    assert node("--max-queued-requests", "none").max_queued_requests is None


def test_a_configuration_is_frozen():
    with pytest.raises(FrozenInstanceError):
        gateway().port = 1  # type: ignore[misc]


def test_secrets_are_neither_printed_nor_put_on_a_command_line():
    config = gateway("--api-key", "hush")
    assert "hush" not in repr(config)
    assert to_flags(GatewayConfig, {"api_key": "hush"}) == []


def test_a_child_process_gets_the_same_configuration_from_flags():
    values = {
        "page_size": 64,
        "max_total_tokens": 4096,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "model": "a b",
    }
    child = node(*to_flags(NodeConfig, values))
    assert child == NodeConfig(role="prefill", **values)


def test_every_option_has_a_help_text():
    for cls in CLASSES.values():
        assert all(len(found.help) > 15 and found.help.endswith(".") for found in options_of(cls).values())
        assert {field.name for field in fields(cls)} - set(options_of(cls)) <= {"role"}


def test_help_shows_defaults_and_variables(capsys):
    with pytest.raises(SystemExit) as ended:
        resolve(NodeConfig, ["--help"], command="decode", help="A decode node.")
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "Tokens per KV page, the unit of caching and transfer. [default: 16]" in shown
    assert "Every option is also an environment variable (--model is BATON_MODEL)" in shown


@pytest.mark.parametrize("command", ["gateway", "decode"])
def test_help_for_which_the_disk_has_no_room_is_one_sentence(command, capsys, monkeypatch):
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            resolve(CLASSES[command], ["--help"], command=command)
    sentence = f"{command}: cannot write to standard output: No space left on device\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, sentence)


KNOWN_DEFAULTS = {
    "schedule_policy": "fcfs",
    "enable_priority_scheduling": False,
    "default_priority_value": None,
    "schedule_low_priority_values_first": False,
    "priority_scheduling_preemption_threshold": 10,
    "max_queued_requests": None,
    "max_running_requests": None,
    "max_total_tokens": None,
    "max_prefill_tokens": 16_384,
    "chunked_prefill_size": None,  # by device
    "enable_dynamic_chunking": False,
    "enable_mixed_chunk": False,
    "page_size": 16,
    "disable_radix_cache": False,
    "stream_interval": 1,
    "truncation_align_size": None,
    "is_retracted_by_priority": False,  # --retraction-policy shortest-output
    "radix_eviction_policy": "lru",
}


def test_defaults_of_scheduling_equal_those_of_sglang():
    config = NodeConfig()
    assert {name: getattr(config, name) for name in KNOWN_DEFAULTS} == KNOWN_DEFAULTS


def test_a_mistake_ends_the_process_with_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        resolve(GatewayConfig, ["--port", "x"], command="gateway")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gateway: --port must be a whole number, not 'x'\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_is_recognised(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_other_addresses_count_as_reachable(host):
    assert not is_loopback(host)


def test_addresses_are_split_into_host_and_port():
    assert host_and_port("a.b:80", "--gateway") == ("a.b", 80)
    assert host_and_port("[::1]:80", "--gateway") == ("::1", 80)


# ---- several models, local prefill ----------------------------------------------------------------------------------


def test_further_models_come_from_flags_commas_the_environment_or_a_list(file, monkeypatch):
    assert gateway().also_serve == ()
    assert gateway("--also-serve", "a=x", "--also-serve=b=org/y@main, c=z").also_serve == (
        "a=x", "b=org/y@main", "c=z",
    )  # fmt: skip
    file.write_text('also-serve = ["a=x", "b=y"]\n')
    assert gateway("--config", str(file)).also_serve == ("a=x", "b=y")
    monkeypatch.setenv("BATON_ALSO_SERVE", "d=w")
    assert gateway("--config", str(file)).also_serve == ("d=w",)


def test_further_models_are_passed_to_child_processes():
    values = {"also_serve": ("a=x", "b=y"), "local_prefill": "always"}
    words = to_flags(GatewayConfig, values)
    assert words == ["--also-serve=a=x", "--also-serve=b=y", "--local-prefill=always"]
    assert gateway(*words).also_serve == ("a=x", "b=y")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--also-serve", "a"], "--also-serve must be NAME=DIR_OR_ID, not 'a'"),
        (["--also-serve", "=x"], "--also-serve must be NAME=DIR_OR_ID"),
        (["--also-serve", "a=x,a=y"], "another model has the name a"),
        (["--also-serve", "baton-small=x"], "another model has the name baton-small"),
        (["--local-prefill", "sometimes"], "--local-prefill must be one of never, auto, always"),
        (["--local-prefill-threshold", "0"], "--local-prefill-threshold must be at least 1"),
        (["--local-prefill-threshold", "9"], "--local-prefill-threshold has no effect without --local-prefill auto"),
        (["--revision", "main"], "--revision is for hub models"),
    ],
)
def test_impossible_models_and_local_prefill_are_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        gateway(*words)


@pytest.mark.parametrize(
    ("words", "needed"),
    [(["--auto-roles-per-hour", "2"], "--auto-roles"), (["--trace-sample-rate", "0.1"], "--otlp-endpoint")],
)
def test_an_option_of_the_gateway_that_needs_another_one_is_refused_without_it(words, needed):
    with pytest.raises(ConfigError, match=f"{words[0]} has no effect without {needed}; add that"):
        gateway(*words)


@pytest.mark.parametrize(("command", "cls"), CLASSES.items())
def test_an_empty_value_is_refused_in_the_same_words_for_every_option(command, cls):
    for found in options_of(cls).values():
        if found.kind is str and not found.choices:
            with pytest.raises(ConfigError, match=f"^{found.flag} is empty; give a value, or leave it out$"):
                parse(cls, [found.flag, ""], command=command)


def test_a_port_below_zero_is_refused_by_serve_too():
    with pytest.raises(ConfigError, match="--control-port must be at least 0, not -1"):
        parse(ServeConfig, ["--control-port", "-1"], command="serve")


def test_prefill_nodes_and_local_prefill_must_fit_together():
    assert parse(ServeConfig, ["--prefill", "0", "--local-prefill", "always"], command="serve").prefill == 0
    for words in (["--prefill", "0"], ["--local-prefill", "always"]):
        with pytest.raises(ConfigError, match="--prefill 0"):
            parse(ServeConfig, words, command="serve")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GatewayConfig, {"host": "", "api_key": "secret"}),
        (GatewayConfig, {"control_host": "", "insecure": True}),
        (NodeConfig, {"http_host": ""}),
        (NodeConfig, {"advertise_host": "", "insecure": True}),
    ],
)
def test_an_empty_address_is_refused_where_it_would_open_a_port_to_every_machine(kind, options):
    with pytest.raises(ConfigError, match=r"-host is empty: give an address"):
        kind(**options)
