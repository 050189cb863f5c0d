"""A node's LoRA adapters: where they may be loaded from, how many, and when they go."""

import re
import threading
from pathlib import Path

import pytest
from support.thread_limit import refuse_thread

from common.config.node import NodeConfig
from common.engine.models.lora.adapters import LoraWeights
from common.errors import ConfigError
from common.node.adapters import MAX_UNLOADED, NodeAdapters
from common.wire.messages import Adapter, Adapters, LoadAdapter, UnloadAdapter

DIGEST = "0123456789abcdef" * 2
LINK = object()


class Engine:
    """Reads adapters whose digest follows from the name of their folder; ``may_read`` lets it go on."""

    def __init__(self) -> None:
        self.adapters: dict[str, LoraWeights] = {}
        self.may_read = threading.Event()
        self.may_read.set()
        self.read: list[Path] = []

    def read_adapter(self, folder: Path, *, max_rank: int, root: Path | None = None) -> LoraWeights:
        assert self.may_read.wait(60)
        self.read.append(folder)
        if folder.name == "broken":
            raise ConfigError(f"{folder}: is broken")
        if folder.name == "surprising":
            raise RuntimeError("a bug")
        return LoraWeights(DIGEST[len(folder.name) % 16 :][:16] * 2, {})

    def drop_adapter(self, adapter: str) -> None:
        del self.adapters[adapter]


class Node:
    """The adapters of a node with a folder, and the answers to what a gateway asks."""

    def __init__(self, folder: Path | None, **options: object) -> None:
        self.engine = Engine()
        self.woken = threading.Event()
        config = NodeConfig(lora_dir=None if folder is None else str(folder), served_model_name="m", **options)  # type: ignore[arg-type]
        self.adapters = NodeAdapters(self.engine, config, self.woken.set)
        self.number = 0

    def ask(self, message: LoadAdapter | UnloadAdapter) -> str:
        """Return the error of the answer; empty if it was done."""
        self.woken.clear()
        self.adapters.begin(LINK, message)
        while not (answers := self.take()):
            assert self.woken.wait(60)
        ((link, answer),) = answers
        assert link is LINK
        assert answer.number == message.number
        assert answer.adapters == self.adapters.listed
        return answer.error

    def take(self, in_use: tuple[str, ...] = (), gateways: tuple[str, ...] = ()) -> list[tuple[object, Adapters]]:
        """Return the answers, without what is told to all gateways."""
        return [one for one in self.adapters.take(in_use, gateways) if one[0] is not None]

    def load(self, name: str, path: str) -> str:
        self.number += 1
        return self.ask(LoadAdapter(name, path, self.number, self.number))

    def unload(self, name: str) -> str:
        self.number += 1
        return self.ask(UnloadAdapter(name, self.number, self.number))

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.adapters.listed]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for adapters, beside one that holds others."""
    for name in ("loras/a", "loras/bb", "loras/ccc", "loras/deep/a", "elsewhere/a"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "loras"


def test_without_a_folder_nothing_is_loaded_while_the_node_serves(folder: Path) -> None:
    node = Node(None)
    assert "--lora-dir" in node.load("a", str(folder / "a"))
    assert node.engine.read == []


def test_a_folder_for_adapters_that_does_not_exist_is_refused_at_start(folder: Path) -> None:
    Node(folder).adapters.load_given()
    missing = folder / "missing"
    with pytest.raises(ConfigError, match=f"^--lora-dir {re.escape(str(missing))}: there is no such folder$"):
        Node(missing).adapters.load_given()


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../elsewhere/a", "a/../../elsewhere/a", "/etc", "{folder}", "{folder}/../elsewhere/a", "\0"],
)
def test_a_path_that_is_not_below_the_folder_is_refused_and_not_read(folder: Path, path: str) -> None:
    node = Node(folder)
    assert node.load("a", path.format(folder=folder)).startswith("lora_path")
    assert node.engine.read == []


def test_a_link_that_leaves_the_folder_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "a")
    node = Node(folder)
    assert "is not below --lora-dir" in node.load("a", "link")
    assert node.engine.read == []


@pytest.mark.parametrize("path", ["a", "deep/a", "./a", "deep/../a", "{folder}/a"])
def test_a_path_below_the_folder_is_loaded(folder: Path, path: str) -> None:
    node = Node(folder)
    assert node.load("a", path.format(folder=folder)) == ""
    assert node.names == ["a"]
    assert node.engine.adapters.keys() == {node.adapters.listed[0].id}
    assert node.adapters.listed[0].id in node.adapters
    assert "a@other" not in node.adapters


def test_an_adapter_is_loaded_although_the_process_may_have_no_further_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(folder)
    monkeypatch.setattr(threading.Thread, "start", refuse_thread)
    assert not node.load("a", "a")


def test_the_name_of_the_model_is_refused(folder: Path) -> None:
    assert "the model itself" in Node(folder).load("m", "a")


@pytest.mark.parametrize(("path", "said"), [("broken", "is broken"), ("surprising", "RuntimeError")])
def test_what_cannot_be_read_is_answered_and_leaves_nothing(folder: Path, path: str, said: str) -> None:
    node = Node(folder)
    assert said in node.load("a", path)
    assert node.names == []
    assert node.engine.adapters == {}
    assert node.load("a", "a") == ""


def test_more_adapters_than_the_limit_are_refused_until_one_is_unloaded(folder: Path) -> None:
    node = Node(folder, max_loaded_loras=2)
    assert node.load("a", "a") == node.load("b", "bb") == ""
    assert "--max-loaded-loras" in node.load("c", "ccc")
    assert node.load("a", "a") == "", "the same again takes no more room"
    assert node.unload("a") == ""
    assert node.load("c", "ccc") == ""
    assert node.names == ["b", "c"]


def test_a_name_keeps_its_content_until_it_is_unloaded(folder: Path) -> None:
    node = Node(folder)
    node.load("a", "a")
    assert "another adapter a" in node.load("a", "bb")
    before = node.adapters.listed
    node.unload("a")
    assert node.load("a", "bb") == ""
    assert node.adapters.listed != before


def test_a_withdrawn_adapter_is_told_to_all_and_goes_with_the_last_request_on_the_node(folder: Path) -> None:
    node = Node(folder)
    node.load("a", "a")
    (loaded,) = node.adapters.listed
    assert (loaded.path, loaded.change) == ("a", 1)
    node.adapters.begin(LINK, UnloadAdapter("a", 2, number=7))
    ((link, news),) = node.adapters.take([loaded.id], [])
    assert link is None
    assert news == Adapters((Adapter("a", loaded.digest, "a", 2, is_withdrawn=True),))
    assert loaded.id in node.adapters, "requests may still come, from a gateway's queue for example"
    node.adapters.begin(LINK, LoadAdapter("a", "a", 3))
    ((_, refused),) = node.adapters.take([loaded.id], [])
    assert "is being unloaded" in refused.error
    node.adapters.begin(LINK, UnloadAdapter("a", 3, number=8))
    assert node.adapters.take([loaded.id], []) == []
    assert node.adapters.has_news
    answers = node.take()
    assert answers == [(LINK, Adapters((), {"a": 3}, number=number)) for number in (7, 8)]
    assert node.engine.adapters == {}
    assert loaded.id not in node.adapters
    assert not node.adapters.has_news


def test_a_withdrawn_adapter_stays_until_every_registered_gateway_has_no_request_for_it(folder: Path) -> None:
    node = Node(folder)
    node.load("a", "a")
    node.load("b", "a")
    a, b = (one.id for one in node.adapters.listed)
    node.adapters.begin(LINK, UnloadAdapter("a", 3))
    assert node.take(gateways=("first", "second")) == []
    node.adapters.unused("first", a)
    node.adapters.unused("second", b)
    assert node.take(gateways=("first", "second")) == []
    assert node.take(gateways=("first", "third")) == [], "a gateway that comes meanwhile has a say"
    assert node.take(gateways=("first",)) == [(LINK, Adapters(node.adapters.listed, {"a": 3}))], "the others are lost"
    assert [one.id for one in node.adapters.listed] == [b]


def test_a_change_that_another_one_has_overtaken_is_refused(folder: Path) -> None:
    node = Node(folder)
    assert node.ask(LoadAdapter("a", "a", 5)) == ""
    assert "has replaced this one" in node.ask(UnloadAdapter("a", 4))
    assert node.ask(LoadAdapter("a", "./a", 6)) == "", "the same content from another path"
    assert [(one.path, one.change) for one in node.adapters.listed] == [("./a", 6)]
    assert node.ask(UnloadAdapter("a", 7)) == ""
    assert "has replaced this one" in node.ask(LoadAdapter("a", "a", 6))
    assert node.adapters.state == Adapters((), {"a": 7})
    assert node.ask(LoadAdapter("a", "a", 8)) == ""
    assert node.adapters.unloaded == {}


@pytest.mark.parametrize("is_unload_first", [False, True])
def test_of_a_load_and_an_unload_with_one_number_the_unload_counts_in_either_order(
    folder: Path, is_unload_first: bool
) -> None:
    node = Node(folder)
    changes = [LoadAdapter("a", "a", 1), UnloadAdapter("a", 1)]
    errors = [node.ask(change) for change in (reversed(changes) if is_unload_first else changes)]
    assert [bool(error) for error in errors] == [False, is_unload_first]
    assert node.adapters.state == Adapters((), {"a": 1})


def test_unloading_what_the_node_does_not_have_is_done_and_remembered(folder: Path) -> None:
    node = Node(folder)
    assert not node.adapters.has_changed
    assert node.unload("a") == ""
    assert node.adapters.unloaded == {"a": 1}
    assert node.adapters.has_changed


def test_the_oldest_of_very_many_unloaded_names_is_forgotten(folder: Path) -> None:
    node = Node(folder)
    for number in range(MAX_UNLOADED + 1):
        node.unload(f"a{number}")
    assert len(node.adapters.unloaded) == MAX_UNLOADED
    assert "a0" not in node.adapters.unloaded


def answers_of_two_loads(node: Node) -> list[tuple[int, str]]:
    node.engine.may_read.set()
    answers: list[tuple[int, str]] = []
    while len(answers) < 2:
        assert node.woken.wait(60)
        node.woken.clear()
        answers += [(answer.number, answer.error) for _, answer in node.take()]
    node.adapters.close()
    return answers


def begin_two_loads(node: Node) -> None:
    node.engine.may_read.clear()
    for number in (1, 2):
        node.adapters.begin(LINK, LoadAdapter("a", "a", 2, number))


def test_an_adapter_that_several_gateways_have_loaded_is_read_once(folder: Path) -> None:
    node = Node(folder, max_loaded_loras=1)
    begin_two_loads(node)
    assert answers_of_two_loads(node) == [(1, ""), (2, "")]
    assert node.names == ["a"]
    assert len(node.engine.read) == 1


@pytest.mark.parametrize("is_served", [False, True])
def test_an_adapter_that_is_unloaded_while_it_is_read_is_not_served(folder: Path, is_served: bool) -> None:
    node = Node(folder)
    if is_served:
        assert node.ask(LoadAdapter("a", "a", 1)) == ""
    begin_two_loads(node)
    assert node.ask(UnloadAdapter("a", 3, 3)) == ""
    late = "a later change of the adapter a has replaced this one; ask again"
    assert answers_of_two_loads(node) == [(1, late), (2, late)]
    assert node.adapters.state == Adapters((), {"a": 3})


def test_an_unload_is_refused_if_a_later_load_is_under_way(folder: Path) -> None:
    node = Node(folder)
    begin_two_loads(node)
    assert "has replaced this one" in node.ask(UnloadAdapter("a", 1, 3))
    assert answers_of_two_loads(node) == [(1, ""), (2, "")]
    assert node.names == ["a"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora": ("a",)}, "NAME=DIR"),
        ({"lora": ("a=",)}, "NAME=DIR"),
        ({"lora": ("a b=x",)}, "a name has"),
        ({"lora": ("a=x", "a=y")}, "given twice"),
        ({"lora": ("m=x",)}, "the model itself"),
        ({"lora": ("a=x", "b=y"), "max_loaded_loras": 1}, "--max-loaded-loras"),
        ({"lora": ("a=x",), "record": "file"}, "--record"),
    ],
)
def test_wrong_options_are_refused_by_their_flag(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match="--lora") as error:
        NodeConfig(served_model_name="m", **options)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_an_adapter_of_the_command_line_that_cannot_be_read_ends_the_start(folder: Path) -> None:
    node = Node(folder, lora=("a=broken",))
    with pytest.raises(ConfigError, match="--lora a: broken: is broken"):
        node.adapters.load_given()


def test_adapters_of_the_command_line_may_be_anywhere(folder: Path) -> None:
    node = Node(None, lora=(f"a={folder.parent}/elsewhere/a", f"org/b-1={folder}/bb"))
    node.adapters.load_given()
    assert node.names == ["a", "org/b-1"]
