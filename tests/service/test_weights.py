"""Node processes with different weights are refused, unless they have the same --weight-version."""

import shutil
from pathlib import Path
from typing import Any

from support.service.service import SMALL_MODEL, Service, running


def fine_tune(folder: Path) -> Path:
    """Copy the small model and flip one bit of its last weight."""
    shutil.copytree(SMALL_MODEL, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    return folder


async def test_a_fine_tune_of_the_same_configuration_is_refused(tmp_path: Path) -> None:
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


def test_nodes_with_the_same_weight_version_are_accepted(tmp_path: Path) -> None:
    only: dict[str, Any] = {"decode-0": {"model": fine_tune(tmp_path / "tuned")}}
    with running(tmp_path / "logs", only=only, node_options={"weight_version": "v1"}) as service:
        workers = service._workers()
        assert workers is not None
        assert [worker["register"]["weight_version"] for worker in workers] == ["v1", "v1"]
