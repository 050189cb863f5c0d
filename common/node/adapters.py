"""The LoRA adapters of a node: those of ``--lora``, and those that gateways have it load and unload while it serves.

An adapter is read on a thread of its own, while steps go on. One that is unloaded is *withdrawn* first: every gateway
is told, takes no new requests for it, and says when none of its own has it any more, queued ones included. The node
drops the adapter when all gateways have said so and the last request on the node that has it has ended.
"""

import logging
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from common.config.lora import ADAPTER_NAME, NAME_RULE, adapters_at_start
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.node.gateways.gateway_link import GatewayLink
from common.wire.messages import MAX_SENTENCE, Adapter, Adapters, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from common.engine.executor import TorchExecutor
    from common.engine.models.lora.adapters import LoraWeights

log = logging.getLogger(__name__)

MAX_UNLOADED = 1_024  # names that are remembered as unloaded


class Asked(NamedTuple):
    """A change that a gateway has asked for.

    Attributes:
        link: the connection to the gateway.
    """

    link: GatewayLink
    message: LoadAdapter | UnloadAdapter


class Read(NamedTuple):
    """What a change has come to: an adapter that the thread has read, or an error, or neither.

    Attributes:
        asked: the changes that are answered with it.
    """

    asked: list[Asked]
    adapter: "LoraWeights | None" = None
    error: str = ""


@dataclass(slots=True)
class Withdrawal:
    """An adapter that is dropped once it is not used any more.

    Attributes:
        asked: the changes that are answered then.
        without: incarnations of the gateways that have no requests for it.
    """

    adapter: Adapter
    asked: list[Asked] = field(default_factory=list)
    without: set[str] = field(default_factory=set)


class NodeAdapters:
    """The adapters of one node, by the ids that requests name: ``id in adapters`` tells whether requests may have it.

    Args:
        notify: wakes the thread that calls ``take``; called by another one.
    """

    def __init__(self, executor: "TorchExecutor", config: NodeConfig, notify: Callable[[], None]) -> None:
        self._executor = executor
        self._config = config
        self._notify = notify
        self._serving: dict[str, Adapter] = {}  # by name
        self._withdrawn: dict[str, Withdrawal] = {}  # by name
        self._unloaded: dict[str, int] = {}  # by name: the number of the change
        self._has_withdrawn = False  # since the last ``take``
        self._loading: dict[tuple[str, str, int], list[Asked]] = {}  # by name, path and number of the change
        self._read: SimpleQueue[Read] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        if config.lora_dir is not None:
            self._thread.submit(int)  # start it now: later, the process may have no further thread

    def __contains__(self, adapter: object) -> bool:
        return any(one.id == adapter for one in self.listed)

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """All adapters, withdrawn ones included."""
        return (*self._serving.values(), *(one.adapter for one in self._withdrawn.values()))

    @property
    def unloaded(self) -> dict[str, int]:
        """Names of adapters that were unloaded here, and the numbers of these changes."""
        return dict(self._unloaded)

    def load_given(self) -> None:
        """Load the adapters of ``--lora``, and look for ``--lora-dir``.

        Raises:
            ConfigError: one cannot be loaded, or there is no such folder.
        """
        root = self._config.lora_dir
        if root is not None and not os.path.isdir(os.path.expanduser(root)):
            raise ConfigError(f"--lora-dir {root}: there is no such folder")
        for name, folder in adapters_at_start(self._config).items():
            try:
                read = self._executor.read_adapter(Path(folder).expanduser(), max_rank=self._config.max_lora_rank)
            except ConfigError as error:
                raise ConfigError(f"--lora {name}: {error}") from error
            self._serve(name, read)

    def _serve(self, name: str, read: "LoraWeights", path: str = "", change: int = 0) -> None:
        adapter = Adapter(name, read.digest, path, change)
        self._executor.adapters[adapter.id] = read
        self._serving[name] = adapter
        self._unloaded.pop(name, None)
        log.info("serving the adapter %s (%s)", name, read.digest)

    # ---- changes while the node serves ------------------------------------------------------------------------------

    def begin(self, link: GatewayLink, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin a change; ``take`` returns its answer, soon or once it is over."""
        asked = Asked(link, message)
        try:
            if (message.change, isinstance(message, UnloadAdapter)) < self._last_change(message.name):
                raise _overtaken(message.name)
            if isinstance(message, UnloadAdapter):
                self._begin_to_unload(asked, message.name)
            else:
                self._begin_to_load(asked, message)
        except ConfigError as error:
            self._read.put(Read([asked], error=str(error)))

    def _last_change(self, name: str) -> tuple[int, bool]:
        """The number of the last change, and whether it was an unload, which overrides a load of the same number."""
        if name in self._withdrawn:
            return self._withdrawn[name].adapter.change, True
        if name in self._serving:
            return self._serving[name].change, False
        return self._unloaded.get(name, 0), name in self._unloaded

    def _begin_to_load(self, asked: Asked, message: LoadAdapter) -> None:
        config, name = self._config, message.name
        if config.lora_dir is None:
            raise ConfigError("this node loads no adapters while it serves; start it with --lora-dir DIR")
        if not re.fullmatch(ADAPTER_NAME, name):
            raise ConfigError(f"lora_name: a name has {NAME_RULE}")
        if name == config.served_name:
            raise ConfigError(f"lora_name: the model itself is served as {name}; give the adapter another name")
        if name in self._withdrawn:
            raise ConfigError(
                f"the adapter {name} is being unloaded; load it again when the last request with it has ended"
            )
        num_held = len({*self._serving, name, *(loading for loading, _, _ in self._loading), *self._withdrawn})
        if num_held > config.max_loaded_loras:
            raise ConfigError(
                f"this node has {num_held - 1} adapters already, which is --max-loaded-loras; unload one, or raise it"
            )
        root = Path(config.lora_dir).expanduser().resolve()
        folder = _below(root, message.path)
        same = self._loading.setdefault((name, message.path, message.change), [])
        same.append(asked)
        if len(same) == 1:  # several gateways may ask for one change
            self._thread.submit(self._load, same, folder, root)

    def _load(self, asked: list[Asked], folder: Path, root: Path) -> None:
        """On the thread: read an adapter, also one that is known, whose content may have changed."""
        try:
            read = Read(asked, self._executor.read_adapter(folder, max_rank=self._config.max_lora_rank, root=root))
        except ConfigError as error:
            read = Read(asked, error=str(error))
        except Exception as error:
            log.exception("the adapter %s cannot be loaded", asked[0].message.name)
            read = Read(asked, error=f"{folder}: cannot be loaded ({type(error).__name__})")
        self._read.put(read)
        self._notify()

    def _begin_to_unload(self, asked: Asked, name: str) -> None:
        change = asked.message.change
        if any(loading == name and later > change for loading, _, later in self._loading):
            raise _overtaken(name)
        if name in self._serving:
            adapter = replace(self._serving.pop(name), change=change, is_withdrawn=True)
            self._withdrawn[name] = Withdrawal(adapter, [asked])
            self._has_withdrawn = True
        elif name in self._withdrawn:
            withdrawal = self._withdrawn[name]
            withdrawal.adapter = replace(withdrawal.adapter, change=change)
            withdrawal.asked.append(asked)
        else:
            self._note_unloaded(name, change)
            self._read.put(Read([asked]))  # a node that does not have it is as it should be

    def _note_unloaded(self, name: str, change: int) -> None:
        self._unloaded.pop(name, None)
        self._unloaded[name] = change
        if len(self._unloaded) > MAX_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]

    def unused(self, gateway: str, adapter: str) -> None:
        """A gateway has no requests for an adapter that is withdrawn."""
        for withdrawal in self._withdrawn.values():
            if withdrawal.adapter.id == adapter:
                withdrawal.without.add(gateway)

    @property
    def has_news(self) -> bool:
        """Whether ``take`` may return something."""
        return bool(self._withdrawn) or not self._read.empty()

    def take(self, in_use: Collection[str], gateways: Collection[str]) -> list[tuple[GatewayLink | None, Adapters]]:
        """Finish changes; return the answers with the connections on which they were asked for, and what is to be
        told to every gateway without a connection.

        Args:
            in_use: ids of the adapters of the requests that are on this node.
            gateways: incarnations of those that may send requests with an adapter that is withdrawn.
        """
        answers: list[tuple[GatewayLink | None, Adapters]] = []
        while not self._read.empty():
            read = self._read.get()
            error = self._finish_load(read)
            answers += [(asked.link, self._answer(asked, error)) for asked in read.asked]
        if self._has_withdrawn:
            self._has_withdrawn = False
            answers.append((None, self.state))
        for name, withdrawal in list(self._withdrawn.items()):
            adapter = withdrawal.adapter
            if adapter.id not in in_use and withdrawal.without.issuperset(gateways):
                self._executor.drop_adapter(adapter.id)
                log.info("dropped the adapter %s", adapter.id)
                del self._withdrawn[name]
                self._note_unloaded(name, adapter.change)
                answers += [(asked.link, self._answer(asked)) for asked in withdrawal.asked]
        return answers

    def _finish_load(self, read: Read) -> str:
        """Serve an adapter that has been read. Return why it is not, or an empty text."""
        self._loading = {change: asked for change, asked in self._loading.items() if asked is not read.asked}
        message = read.asked[0].message
        name = message.name
        if read.adapter is None or not isinstance(message, LoadAdapter):
            return read.error
        served = self._serving.get(name)
        if served is None:
            if (message.change, False) < self._last_change(name):  # it was unloaded while it was read
                return str(_overtaken(name))
            self._serve(name, read.adapter, message.path, message.change)
        elif served.digest != read.adapter.digest:
            return f"this node has another adapter {name} already; unload that one first"
        elif message.change >= served.change:
            self._serving[name] = replace(served, path=message.path, change=message.change)
        return ""

    @property
    def has_changed(self) -> bool:
        """Whether gateways have changed the adapters of ``--lora``."""
        return bool(self._withdrawn or self._unloaded) or any(one.change for one in self._serving.values())

    @property
    def state(self) -> Adapters:
        """What gateways are told."""
        return Adapters(self.listed, self.unloaded)

    def _answer(self, asked: Asked, error: str = "") -> Adapters:
        if error:
            log.warning("%s", error)
        return replace(self.state, error=error[:MAX_SENTENCE], number=asked.message.number)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _overtaken(name: str) -> ConfigError:
    return ConfigError(f"a later change of the adapter {name} has replaced this one; ask again")


def _below(root: Path, path: str) -> Path:
    """Return the folder that ``path`` names, relative to ``root`` or absolute.

    Raises:
        ConfigError: it is not below ``root``, once links are followed.
    """
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"lora_path {path!r}: not a path ({error})") from error
    if folder == root or not folder.is_relative_to(root):
        raise ConfigError(f"lora_path {path!r}: is not below --lora-dir of this node")
    return folder
