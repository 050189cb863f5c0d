"""The LoRA adapters of a node: those of ``--lora``, and those that gateways have it load and unload while it serves.

An adapter is read on a thread of its own, while steps go on. One that is unloaded takes no new requests at once, and
is dropped when the last request on this node that has it has ended.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from common.config.lora import ADAPTER_NAME, NAME_RULE, adapters_at_start
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.wire.messages import Adapter, Adapters, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from common.engine.models.lora import LoraWeights

log = logging.getLogger(__name__)

MAX_ERROR = 512  # characters of an answer


class AdapterEngine(Protocol):
    """The part of an executor that has adapters."""

    adapters: "dict[str, LoraWeights]"

    def read_adapter(self, folder: Path, *, max_rank: int, root: Path | None = None) -> "LoraWeights": ...

    def drop_adapter(self, adapter: str) -> None: ...


class Asked(NamedTuple):
    """A change that a gateway has asked for.

    Attributes:
        link: the connection to the gateway.
    """

    link: Any
    message: LoadAdapter | UnloadAdapter


class Read(NamedTuple):
    """An adapter that the thread has read, or why it could not.

    Attributes:
        was_loading: whether the thread had it; otherwise it was answered at once.
    """

    asked: Asked
    adapter: "LoraWeights | None" = None
    error: str = ""
    was_loading: bool = True


class NodeAdapters:
    """The adapters of one node, by the ids that requests name: ``id in adapters`` tells whether it takes requests.

    Args:
        notify: wakes the thread that calls ``take``; called by another one.
    """

    def __init__(self, engine: AdapterEngine, config: NodeConfig, notify: Callable[[], None]) -> None:
        self._engine = engine
        self._config = config
        self._notify = notify
        self._serving: dict[str, Adapter] = {}  # by name
        self._retiring: dict[str, list[Asked]] = {}  # by id
        self._loading: Counter[str] = Counter()  # by name
        self._read: SimpleQueue[Read] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __contains__(self, adapter: object) -> bool:
        return any(one.id == adapter for one in self._serving.values())

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """Those that take requests."""
        return tuple(self._serving.values())

    def load_given(self) -> None:
        """Load the adapters of ``--lora``.

        Raises:
            ConfigError: one cannot be loaded.
        """
        for name, folder in adapters_at_start(self._config).items():
            try:
                read = self._engine.read_adapter(Path(folder).expanduser(), max_rank=self._config.max_lora_rank)
            except ConfigError as error:
                raise ConfigError(f"--lora {name}: {error}") from error
            self._serve(name, read)

    def _serve(self, name: str, read: "LoraWeights") -> None:
        adapter = Adapter(name, read.digest)
        self._engine.adapters[adapter.id] = read
        self._serving[name] = adapter
        log.info("serving the adapter %s (%s)", name, read.digest)

    # ---- changes while the node serves ------------------------------------------------------------------------------

    def begin(self, link: Any, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin a change; ``take`` returns its answer, soon or once it is over."""
        asked = Asked(link, message)
        try:
            if isinstance(message, UnloadAdapter):
                self._begin_to_unload(asked, message.name)
            else:
                self._begin_to_load(asked, message)
        except ConfigError as error:
            self._read.put(Read(asked, error=str(error), was_loading=False))

    def _begin_to_load(self, asked: Asked, message: LoadAdapter) -> None:
        config, name = self._config, message.name
        if config.lora_dir is None:
            raise ConfigError("this node loads no adapters while it serves; start it with --lora-dir DIR")
        if not re.fullmatch(ADAPTER_NAME, name):
            raise ConfigError(f"lora_name: a name has {NAME_RULE}")
        if name == config.served_name:
            raise ConfigError(f"lora_name: the model itself is served as {name}; give the adapter another name")
        num_held = len({*self._serving, name, *self._loading}) + len(self._retiring)
        if num_held > config.max_loaded_loras:
            raise ConfigError(
                f"this node has {num_held - 1} adapters already, which is --max-loaded-loras; unload one, or raise it"
            )
        root = Path(config.lora_dir).resolve()
        folder = _below(root, message.path)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading[name] += 1
        self._threads.submit(self._load, asked, folder, root)

    def _load(self, asked: Asked, folder: Path, root: Path) -> None:
        """On the thread: read an adapter, also one that is known, since several gateways may ask for the same."""
        try:
            read = Read(asked, self._engine.read_adapter(folder, max_rank=self._config.max_lora_rank, root=root))
        except ConfigError as error:
            read = Read(asked, error=str(error))
        except Exception as error:
            log.exception("the adapter %s cannot be loaded", asked.message.name)
            read = Read(asked, error=f"{folder}: cannot be loaded ({type(error).__name__})")
        self._read.put(read)
        self._notify()

    def _begin_to_unload(self, asked: Asked, name: str) -> None:
        if name in self._loading:
            raise ConfigError(f"the adapter {name} is being loaded; unload it when it is there")
        found = self._serving.pop(name, None)
        if found is not None:
            self._retiring.setdefault(found.id, []).append(asked)
            return
        for adapter, waiting in self._retiring.items():
            if adapter.startswith(f"{name}@"):
                waiting.append(asked)
                return
        self._read.put(Read(asked, was_loading=False))  # a node that does not have it is as it should be

    @property
    def has_news(self) -> bool:
        """Whether ``take`` may return something."""
        return bool(self._retiring) or not self._read.empty()

    def take(self, in_use: Collection[str]) -> list[tuple[Any, Adapters]]:
        """Finish changes; returns the answers with the connections on which they were asked for.

        Args:
            in_use: ids of the adapters of the requests that are on this node.
        """
        answers: list[tuple[Any, Adapters]] = []
        while not self._read.empty():
            read = self._read.get()
            error = self._finish_load(read)
            answers.append((read.asked.link, self._answer(read.asked, error)))
        for adapter in [one for one in self._retiring if one not in in_use]:
            self._engine.drop_adapter(adapter)
            log.info("dropped the adapter %s", adapter)
            answers += [(asked.link, self._answer(asked)) for asked in self._retiring.pop(adapter)]
        return answers

    def _finish_load(self, read: Read) -> str:
        """Serve an adapter that has been read. Returns why it is not, or an empty text."""
        name = read.asked.message.name
        if read.was_loading:
            self._loading -= Counter([name])
        if read.adapter is None:
            return read.error
        served = self._serving.get(name)
        if served is not None and served.digest != read.adapter.digest:
            return f"this node has another adapter {name} already; unload that one first"
        if Adapter(name, read.adapter.digest).id in self._retiring:
            return f"the adapter {name} is being unloaded; load it again when the last request with it has ended"
        if served is None:
            self._serve(name, read.adapter)
        return ""

    def _answer(self, asked: Asked, error: str = "") -> Adapters:
        if error:
            log.warning("%s", error)
        return Adapters(self.listed, error[:MAX_ERROR], asked.message.number)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _below(root: Path, path: str) -> Path:
    """Return the folder that ``path`` names, relative to ``root`` or absolute.

    Raises:
        ConfigError: it is not below ``root``, once links are followed.
    """
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"lora_path {path!r}: is no path ({error})") from error
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"lora_path {path!r}: is not below --lora-dir of this node")
    return folder
