"""``cluster.toml``: what is read, and what is refused with which words."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from scripts.cluster_manager.config import read_cluster_file

EXAMPLE = Path(__file__).resolve().parents[2] / "docs/examples/cluster.toml"
LEAST = "[gateway]\ncount = 1\n[prefill]\ncount = 1\n[decode]\ncount = 2\n"


def read(folder: Path, text: str):
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path)


def test_the_example_is_read() -> None:
    config = read_cluster_file(EXAMPLE)
    assert (config.gateway.count, config.prefill.count, config.decode.count) == (2, 2, 4)
    assert config.decode.bundle == {"CPU": 4.0, "GPU": 2.0, "memory": 40e9}
    assert config.values("decode") == {
        "model": "/models/Qwen3-0.6B",
        "served_model_name": "qwen",
        "keys": "/etc/baton/keys",
        "tp": 2,
        "max_running_requests": 128,
        "memory_fraction": 0.8,
    }


def test_options_of_a_group_take_precedence(tmp_path: Path) -> None:
    config = read(tmp_path, "options = { log-level = 'error' }\n" + LEAST + "options = { log_level = 'debug' }\n")
    assert [config.values(role)["log_level"] for role in ("gateway", "decode")] == ["error", "debug"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway]\ncount = 1\n", "missing required field `prefill`"),
        (LEAST + "cout = 3\n", "unknown field `cout` - at `decode`"),
        (LEAST.replace("count = 2", "count = -1"), ">= 0 - at `decode.count`"),
        (LEAST.replace("count = 2", "count = 'two'"), "Expected `int`, got `str` - at `decode.count`"),
        (LEAST + "cpus = inf\n", "<= 1000000000.0 - at `decode.cpus`"),
        (LEAST + "resources = { tpu = 1e10 }\n", "<= 1000000000.0 - at `decode.resources[...]`"),
        (LEAST + "placement = 'near'\n", "Invalid enum value 'near' - at `decode.placement`"),
        (LEAST + "near = 'decode'\n", "decode.near is the group itself"),
        ("name = '../x'\n" + LEAST, "at `name`"),
        (LEAST + "options = { page-sise = 4 }\n", "did you mean page_size?"),
        (LEAST + "options = { page-size = 'big' }\n", "[decode.options] or [options] must be a whole number"),
        (
            "options = { page-size = 4 }\n" + LEAST,
            "gateway processes: move it to [prefill.options] and [decode.options]",
        ),
        (
            "options = { port = 4 }\n" + LEAST,
            "port in [options] is not an option of prefill processes: move it to [gateway.options]",
        ),
        (LEAST + "options = { name = 'mine' }\n", "decode.options.name follows from where the process is placed"),
        (LEAST + "options = { cluster-key = 'secret' }\n", "set BATON_CLUSTER_KEY in the environment of ray start"),
        (LEAST + "gpus = 1\noptions = { tp = 2 }\n", "decode.gpus = 1 is less than its ranks (tp = 2); give gpus = 2"),
        (LEAST + "resources = { GPU = 1 }\n", "decode.resources.GPU has a key of its own: give decode.gpus instead"),
        (LEAST + "resources = { memory = 1e9 }\n", "give decode.memory-gb instead"),
        (LEAST + "autoscale = { min = 3, max = 4 }\n", "decode.count = 2 is not within autoscale (3 to 4)"),
        (LEAST + "autoscale = { min = 3, max = 2 }\n", "decode.autoscale.min = 3 is more than its max = 2"),
        (LEAST.replace("count = 1", "count = 0", 1), "gateway.count must be at least 1"),
        (LEAST.replace("count = 2", "count = 0"), "decode.count must be at least 1"),
        (LEAST.replace("[prefill]\ncount = 1", "[prefill]\ncount = 0"), 'add local-prefill = "always"'),
        (
            LEAST.replace("count = 1\n", "count = 1\nautoscale = { min = 1, max = 2 }\n", 1),
            "gateways advise on nodes alone",
        ),
        (
            LEAST.replace("count = 1\n", "count = 1\noptions = { auto-roles = true }\n", 1)
            + "autoscale = { min = 1, max = 2 }\n",
            "would both change the groups",
        ),
        ("count = ", "is not valid TOML"),
        (f"count = {'9' * 5_000}\n", "has a number that is too long, or is nested too deeply"),
        (f"count = {'[' * 5_000}\n", "has a number that is too long, or is nested too deeply"),
    ],
)
def test_a_mistake_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*none\.toml cannot be read"):
        read_cluster_file(tmp_path / "none.toml")
