"""Nodes whose weights differ, as real processes: refused, unless --weight-version says that they are the same."""

import shutil
from pathlib import Path
from typing import Any

from service import SMALL_MODEL, Service, running


def fine_tune(folder: Path) -> Path:
    """The small model with one bit of its last weight turned."""
    shutil.copytree(SMALL_MODEL, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    return folder


async def test_a_fine_tune_of_the_same_configuration_is_refused_with_a_sentence(tmp_path: Path) -> None:
    only: dict[str, Any] = {"decode-1": {"model": fine_tune(tmp_path / "tuned")}}
    service = Service(tmp_path / "logs", decode=2, only=only)
    try:
        service.start("gateway", "prefill-0", "decode-0")
        service.wait_until_ready()
        service.start("decode-1")
        assert service.processes.pop("decode-1").wait(60) == 2
        assert "the gateway refuses this node: weight version of node decode-1 is " in service.log()
        assert "must be equal: their weights differ" in service.log()
        async with service.client() as client:
            await client.generate("To be", 2)
    finally:
        service.close()


def test_equal_weight_versions_are_taken_at_their_word(tmp_path: Path) -> None:
    only: dict[str, Any] = {"decode-0": {"model": fine_tune(tmp_path / "tuned")}}
    with running(tmp_path / "logs", only=only, node_options={"weight_version": "v1"}) as service:
        workers = service._workers()
        assert workers is not None
        assert [worker["register"]["weight_version"] for worker in workers] == ["v1", "v1"]
