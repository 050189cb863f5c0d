"""Registration, restarts and loss of nodes."""

import pytest
from support.gateway.fake_nodes import adapter, make_register

from common.errors import ErrorCode, RequestError
from common.wire.messages import (
    MAX_SECONDS,
    Heartbeat,
    LayoutMessage,
    NodeCosts,
    PairState,
    Refused,
    Registered,
)
from gateway.workers import registry as registry_module
from gateway.workers.registry import LastChange, Registry
from gateway.workers.routing.router import Router

A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)


def registry():
    return Registry(num_token_ids=320, heartbeat_s=1.0, lost_after_s=10.0)


def pair():
    nodes = registry()
    assert nodes.register(A, make_register("prefill", "p"), 0.0) == Registered(1, 1.0)
    assert nodes.register(B, make_register("decode", "d", num_pages=32), 0.0) == Registered(1, 1.0)
    return nodes


def test_what_a_node_says_of_its_pool_and_its_costs_reaches_the_router_in_bounds():
    nodes = registry()
    nodes.register(B, make_register("decode", "d", most_held_tokens=128), 0.0)
    assert nodes.workers[B].most_held_tokens == 128
    costs = NodeCosts(transfer_bytes_per_s=5e-324)
    nodes.on_heartbeat(B, Heartbeat(0, 0, 0, 0, 0, {}, costs=costs), 1.0)
    assert nodes.workers[B].send_token_s == MAX_SECONDS


def test_ready_needs_a_node_of_each_role_that_is_not_leaving():
    nodes = registry()
    assert not nodes.is_ready
    assert nodes.limits is None
    nodes.register(A, make_register("prefill", "p"), 0.0)
    assert not nodes.is_ready
    nodes.register(B, make_register("decode", "d"), 0.0)
    assert nodes.is_ready
    nodes.begin_drain(A)
    assert not nodes.is_ready


def test_new_requests_are_accepted_for_a_while_after_the_last_node_of_a_role_is_gone():
    nodes = Registry(num_token_ids=320, recovery_timeout_s=60.0)
    nodes.register(A, make_register("prefill", "p"), 0.0)
    assert nodes.accepted is None, "there was no decode node yet"
    nodes.register(B, make_register("decode", "d"), 0.0)
    known = nodes.limits
    nodes.tick(5.0)
    nodes.remove(B)
    nodes.register(C, make_register("prefill", "p2"), 50.0)
    nodes.tick(65.0)
    assert (nodes.limits, nodes.accepted) == (None, known)
    nodes.tick(65.1)
    assert nodes.accepted is None
    nodes.register(D, make_register("decode", "d"), 70.0)
    assert nodes.accepted is nodes.limits is not None


def refusal_of(nodes, adapter):
    with pytest.raises(RequestError) as caught:
        nodes.check_adapter(adapter.id)
    return caught.value


def test_an_adapter_that_was_replaced_is_not_served_by_nodes_that_have_missed_it():
    old, new = adapter("sql", "v1", change=3), adapter("sql", "v2", change=7)
    nodes = registry()
    for name, version in (A, old), (B, old), (C, new), (D, new):
        nodes.register(name, make_register("decode" if name in (B, D) else "prefill", name, adapters=(version,)), 0.0)
    assert nodes.adapters == {"sql": old.id}
    nodes.set_last_change("sql", LastChange(7, "v2", new.id))
    assert nodes.adapters == {"sql": new.id}
    assert refusal_of(nodes, old).message == "the adapter 'sql' has been unloaded"
    nodes.remove(D)
    assert nodes.adapters == {}


def test_an_adapter_is_asked_for_while_the_workers_cannot_serve_a_request():
    sql = adapter("sql", "v1", change=3)
    nodes = registry()
    nodes.register(A, make_register("prefill", "p", adapters=(sql,)), 0.0)
    nodes.register(B, make_register("decode", "d", adapters=(sql,)), 0.0)
    nodes.set_last_change("sql", LastChange(3, "v1", sql.id))
    nodes.remove(A)
    nodes.remove(B)
    nodes.register(C, make_register("prefill", "p"), 1.0)
    assert nodes.adapters == {"sql": sql.id}
    nodes.check_adapter(sql.id)
    nodes.register(D, make_register("decode", "d"), 1.0)
    assert nodes.adapters == {}
    for error in (nodes.refuse_adapter("sql"), refusal_of(nodes, sql)):
        assert error.code is ErrorCode.NO_ROUTE, "both will load it"
        assert error.message.endswith("it is on no node")
    nodes.set_last_change("sql", LastChange(4, None))
    assert nodes.refuse_adapter("sql") is None
    assert refusal_of(nodes, sql).code is ErrorCode.MODEL_NOT_FOUND


def test_an_adapter_that_is_unloaded_or_replaced_while_the_workers_cannot_serve_a_request_is_not_asked_for():
    sql = adapter("sql", "v1")
    for change in LastChange(4, None), LastChange(4, "v2", "sql@other"):
        nodes = registry()
        nodes.register(A, make_register("prefill", "p", adapters=(sql,)), 0.0)
        nodes.register(B, make_register("decode", "d", adapters=(sql,)), 0.0)
        nodes.remove(A)
        nodes.remove(B)
        assert nodes.knows_adapter("sql")
        nodes.set_last_change("sql", change)
        assert nodes.adapters == {}


def test_after_one_load_nodes_serve_an_adapter_if_theirs_are_equal_whichever_was_heard_of_first():
    first, second = adapter("sql", "v1", change=7), adapter("sql", "v2", change=7)
    nodes = registry()
    for name, version in (A, first), (B, second), (C, second):
        nodes.register(name, make_register("prefill" if name == C else "decode", name, adapters=(version,)), 0.0)
    nodes.set_last_change("sql", LastChange(7, "v", first.id))
    assert nodes.adapters == {"sql": second.id}


@pytest.mark.parametrize(("lost_at", "until"), [(11.9, 11.9), (15.0, 12.0)])
def test_a_node_that_was_silent_for_long_was_alive_only_until_a_heartbeat_was_overdue(lost_at, until):
    nodes = pair()
    nodes.on_heartbeat(A, Heartbeat(0, 0, 0, 0, 0, {}), 10.0)
    assert nodes.alive_until(nodes.workers[A], lost_at) == until


def test_limits_are_those_of_the_largest_pools():
    nodes = pair()
    nodes.register(C, make_register("decode", "d2", num_pages=100), 0.0)
    limits = nodes.limits
    assert limits is not None
    assert (limits.prompt_tokens, limits.total_tokens, limits.common_tokens) == (64 * 16, 100 * 16, 32 * 16)
    assert limits.max_running == 16


def test_limits_of_a_model_with_windows_are_not_those_of_the_pools():
    nodes = registry()
    nodes.register(A, make_register("prefill", "p", num_pages=8, longest_tokens=512), 0.0)
    nodes.register(B, make_register("decode", "d", num_pages=8, longest_tokens=512), 0.0)
    nodes.register(C, make_register("decode", "small", num_pages=2, longest_tokens=32), 0.0)
    limits = nodes.limits
    assert limits is not None
    assert (limits.prompt_tokens, limits.total_tokens, limits.common_tokens) == (512, 512, 32)
    pair = Router().choose(nodes.prefills, nodes.decodes, range(300), num_new=200)
    assert pair is not None and pair.nodes == (A, B)


def test_a_node_with_another_tokenizer_is_refused_and_one_without_is_not() -> None:
    nodes = Registry(num_token_ids=320, tokenizer_digest="t1")
    assert isinstance(nodes.register(A, make_register("prefill", "p", tokenizer_digest="t1"), 0.0), Registered)
    assert isinstance(nodes.register(B, make_register("decode", "d"), 0.0), Registered)
    refused = nodes.register(C, make_register("decode", "d2", tokenizer_digest="t2"), 0.0)
    assert isinstance(refused, Refused)
    assert "the tokenizer.json of node d2 differs from the gateway's: give both the same --model" in refused.reason


def test_a_model_may_have_fewer_ids_than_its_own_tokenizer() -> None:
    nodes = Registry(num_token_ids=320, tokenizer_digest="t1")
    smaller = make_register("prefill", "p", vocab_size=319, tokenizer_digest="t1")
    assert isinstance(nodes.register(A, smaller, 0.0), Registered)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 600}, "vocabulary size"),
        ({"context_length": 100}, "context length"),
        ({"eos_token_ids": (1,)}, "end tokens"),
        ({"generation": {"top_p": 0.5}}, "generation defaults"),
        (
            {"layout": LayoutMessage(2, 2, 16, 24, "float32")},
            "page sizes 24 and 16 one must be a multiple of the other: change --page-size",
        ),
        ({"layout": LayoutMessage(2, 2, 16, 16, "bfloat16")}, "page layout"),
        ({"layout": LayoutMessage(2, 1, 16, 32, "float32")}, "kv heads 1 and 2 must be equal"),
        ({"transports": ("tcp",)}, "no transport in common"),
        ({"num_ranks": 3}, "node d2 is broken: 2 kv heads cannot be divided among 3 ranks"),
        ({"vocab_size": 300}, "tokenizer has 320"),
    ],
)
def test_a_node_that_differs_is_refused_with_a_sentence(changes, words):
    nodes = pair()
    answer = nodes.register(C, make_register("decode", "d2", **changes), 0.0)
    assert isinstance(answer, Refused)
    assert words in answer.reason
    assert list(nodes.workers) == [A, B]


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64])
def test_page_sizes_of_the_two_roles_may_be_multiples(page_size):
    nodes = pair()
    layout = LayoutMessage(2, 2, 16, page_size, "float32")
    assert isinstance(nodes.register(C, make_register("decode", "d2", layout=layout), 0.0), Registered)


def test_within_one_role_only_page_sizes_may_differ():
    nodes = registry()
    nodes.register(A, make_register("decode", "d1", layout=LayoutMessage(2, 2, 16, 24, "float32")), 0.0)
    others = LayoutMessage(2, 2, 16, 32, "float32"), LayoutMessage(2, 2, 16, 32, "float16")
    answers = [nodes.register(B, make_register("decode", "d2", layout=other), 0.0) for other in others]
    assert [type(answer) for answer in answers] == [Registered, Refused]


def test_nodes_of_one_role_need_no_common_transport():
    nodes = registry()
    nodes.register(A, make_register("decode", "d1", transports=("tcp",)), 0.0)
    assert isinstance(nodes.register(B, make_register("decode", "d2", transports=("shm",)), 0.0), Registered)


def test_nodes_of_another_revision_serve_the_same_name_once_both_roles_are_there():
    nodes = pair()
    new = {"weight_version": "w2", "layout": LayoutMessage(4, 2, 32, 24, "bfloat16"), "transports": ("tcp",)}
    assert isinstance(nodes.register(C, make_register("decode", "new-d", **new), 0.0), Registered)
    assert [node.name for node in nodes.decodes] == ["d"], "it has no prefill node yet"
    assert isinstance(nodes.register(D, make_register("prefill", "new-p", **new), 0.0), Registered)
    assert [node.name for node in nodes.decodes] == ["d", "new-d"]
    assert [node.name for node in nodes.page_sources()[nodes.workers[C].revision]] == ["new-p"]
    nodes.remove(A)
    assert nodes.is_ready
    assert [node.name for node in nodes.decodes] == ["new-d"]


def test_a_prefill_node_needs_an_address():
    assert "no address" in registry().register(A, make_register("prefill", "p", address=""), 0.0).reason


def test_a_name_is_in_use_until_its_node_is_gone():
    nodes = pair()
    assert "is registered already" in nodes.register(C, make_register("decode", "d", num_pages=32), 1.0).reason
    nodes.remove(B)
    assert nodes.register(C, make_register("decode", "d", num_pages=32), 2.0) == Registered(2, 1.0, 2.0)


def test_the_same_start_may_register_again_and_keeps_its_number():
    nodes = pair()
    assert nodes.register(B, make_register("decode", "d", num_pages=32), 5.0) == Registered(1, 1.0, 5.0)
    nodes.remove(B)
    assert nodes.register(B, make_register("decode", "d", num_pages=32), 6.0) == Registered(1, 1.0, 6.0)


def test_an_earlier_start_of_a_name_is_refused():
    nodes = pair()
    nodes.remove(B)
    nodes.register(C, make_register("decode", "d"), 1.0)
    nodes.remove(C)
    assert "later start" in nodes.register(B, make_register("decode", "d"), 2.0).reason


def test_the_names_that_have_not_been_here_for_longest_are_forgotten(monkeypatch):
    monkeypatch.setattr(registry_module, "MAX_NAMES_REMEMBERED", 2)
    nodes = registry()
    for incarnation, name, num_starts in ((A, "a", 1), (B, "b", 1), (C, "a", 2), (D, "d", 1), (B, "b", 1)):
        assert nodes.register(incarnation, make_register("decode", name), 0.0).starts == num_starts
        nodes.remove(incarnation)
    assert list(nodes._starts) == ["d", "b"]


def test_an_empty_registry_accepts_another_deployment():
    nodes = pair()
    nodes.remove(A)
    nodes.remove(B)
    assert isinstance(nodes.register(C, make_register("decode", "new", digest="d2"), 1.0), Registered)


def test_a_node_is_lost_without_heartbeats():
    nodes = pair()
    heartbeat = Heartbeat(1, 2, 3, 4, 0, {"steps": 7.0})
    nodes.on_heartbeat(A, heartbeat, 9.0)
    assert nodes.silent_workers(10.0) == []
    assert nodes.silent_workers(10.5) == [B]
    assert nodes.workers[A].heartbeat == heartbeat


def test_with_local_prefill_decode_nodes_are_enough():
    nodes = Registry(num_token_ids=320, needs_prefill=False)
    nodes.register(A, make_register("prefill", "p"), 0.0)
    assert not nodes.is_ready
    nodes.register(B, make_register("decode", "d", num_pages=32), 0.0)
    assert nodes.is_ready
    nodes.remove(A)
    limits = nodes.limits
    assert limits is not None
    assert (limits.prompt_tokens, limits.total_tokens) == (32 * 16, 32 * 16)
    nodes.begin_drain(B)
    assert not nodes.is_ready


def test_a_registry_without_a_usable_pair_is_not_ready():
    nodes = pair()
    failed = PairState("p", A, "nixl", "", "other bytes came back")
    assert not nodes.set_pairs(B, (failed,))
    assert not nodes.is_ready
    assert nodes.lacking == "pair of a prefill and a decode node that can exchange pages (other bytes came back)"
    nodes.register(C, make_register("decode", "d2"), 0.0)
    assert nodes.is_ready
    assert [node.name for node in nodes.decodes] == ["d2"]
    assert nodes.set_pairs(B, (PairState("p", A, "nixl", "it was asked for"),)), "it may be used again"
    assert [node.name for node in nodes.decodes] == ["d", "d2"]


def test_nodes_of_both_roles_with_different_weights_lack_a_pair_with_the_same():
    nodes = registry()
    assert nodes.lacking == "pair of a prefill and a decode node"
    nodes.register(A, make_register("prefill", "p", weight_version="1"), 0.0)
    nodes.register(B, make_register("decode", "d", weight_version="1-int8"), 0.0)
    assert not nodes.is_ready
    assert nodes.lacking.startswith("pair of a prefill and a decode node with the same weights and options")
    nodes.register(C, make_register("decode", "d2", weight_version="1"), 0.0)
    assert nodes.is_ready


def test_decode_nodes_that_compute_prompts_themselves_need_no_usable_pair():
    nodes = Registry(num_token_ids=320, needs_prefill=False)
    nodes.register(A, make_register("prefill", "p"), 0.0)
    nodes.register(B, make_register("decode", "d"), 0.0)
    nodes.set_pairs(B, (PairState("p", A, "nixl", "", "other bytes came back"),))
    assert nodes.is_ready
