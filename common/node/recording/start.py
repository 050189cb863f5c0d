"""Opens the recording of a node and writes its header."""

import logging
from typing import Any

from common.errors import ConfigError
from common.node.recording.format import VERSION as RECORDING_VERSION
from common.node.recording.format import RecordingHeader
from common.node.recording.recorder import Recorder, plain_config, read_environ
from common.node.worker_context import WorkerContext
from common.wire.messages import LayoutMessage

log = logging.getLogger(__name__)


def start_recording(worker: WorkerContext, ends: Any) -> Recorder:
    """Open the recording that ``--record`` asks for, and write its header.

    Raises:
        ConfigError: the file cannot be created.
    """
    config = worker.config
    assert config.record is not None
    try:
        recorder = Recorder(config.record)
    except OSError as error:
        raise ConfigError(f"cannot create --record {config.record}: {error.strerror}") from error
    log.warning("recording into %s, prompts included", recorder.path)
    transport = ends.writer if config.role == "prefill" else ends.reader
    recorder.note(
        RecordingHeader(
            version=RECORDING_VERSION,
            role=config.role,
            config=plain_config(config),
            environ=read_environ(worker.environ),
            capacity=worker.capacity,
            layout=LayoutMessage.of(worker.layout),
            digest=worker.digest,
            incarnation=worker.incarnation,
            vocab_size=worker.vocab_size,
            eos_token_ids=worker.eos_token_ids,
            transport=transport.name,
            transports=tuple(transport.names),
        )
    )
    return recorder
