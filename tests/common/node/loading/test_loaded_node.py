"""What a node tells gateways at each registration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.kv.kv_fakes import LAYOUT

from common.config.node import NodeConfig
from common.model_folder import tokenizer_digest
from common.node.loading.loaded_node import LoadedNode


def node_of(folder: Path) -> LoadedNode:
    model: Any = SimpleNamespace(
        folder=str(folder),
        tokenizer_folder=folder,
        digest="d",
        weight_version="w",
        vocab_size=10,
        context_length=10,
        eos_token_ids=(),
        generation={},
    )
    adapters: Any = SimpleNamespace(listed=(), unloaded={})
    unused: Any = None
    return LoadedNode(model, unused, {}, unused, adapters=adapters, http=None, drain_timeout_s=0.0)


def test_the_tokenizer_is_the_one_that_was_loaded_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """A node registers again with every gateway that starts again, perhaps when it can open no more files."""
    file = tmp_path / "tokenizer.json"
    file.write_text("one")
    node, loaded = node_of(tmp_path), tokenizer_digest(tmp_path)
    config = NodeConfig(served_model_name="m", device="cpu", name="decode-0")
    capacity = SimpleNamespace(num_pages=1, num_slots=1, max_queued=1)
    worker: Any = SimpleNamespace(config=config, layout=LAYOUT, capacity=capacity, longest_tokens=1, most_held_tokens=0)
    role: Any = SimpleNamespace(transports=lambda: ("shm",))
    endpoint: Any = SimpleNamespace(listen=SimpleNamespace(port=1), keys=None)
    file.write_text("another")
    assert node._register(worker, role, endpoint).tokenizer_digest == loaded
