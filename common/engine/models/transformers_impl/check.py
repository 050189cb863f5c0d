"""Compares a reduced copy of a model with the library's own attention, before an untested model is served.

The copy has random weights, a small vocabulary, short windows, and the first layers of the model, up to one of each
kind. Requests longer than its windows run in chunks over pages, two of them in one step; the library computes each of
them at once with its eager attention.
"""

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM

from common.engine.attention import make_attention
from common.engine.attention.protocol import AttentionBackend
from common.engine.batch import RowArrays, make_batch
from common.engine.kv_pool import KVPool
from common.engine.models.protocol import CausalModel
from common.engine.models.transformers_impl.attention import AttentionHook, freeze_rope
from common.engine.models.transformers_impl.config import (
    TransformersConfig,
    load_library_config,
    make_on_meta,
    observe_attention,
)
from common.engine.models.transformers_impl.model import TransformersModel, pack
from common.engine.models.transformers_impl.tp_plan import TpPlan
from common.engine.tensor_parallel.group import open_group
from common.engine.tensor_parallel.shard import Shard
from common.errors import RankLostError, UnsupportedModelError

log = logging.getLogger(__name__)

_VOCAB_SIZE = 64
_WINDOW = 8
_PAGE_SIZE = 4
#: Tokens of the two requests, which are longer than the window.
_LENGTHS = (41, 21)
#: Steps as rows of (request, cached tokens, new tokens).
_STEPS = (((0, 0, 17), (1, 0, 20)), ((0, 17, 23),), ((0, 40, 1), (1, 20, 1)))
#: Greatest difference of two logits, in units of their standard deviation.
_TOLERANCE = 1e-3
#: The longest time that a rank of the copy waits for another.
_TIMEOUT_S = 60.0


def check_reduced_copy(config: TransformersConfig, num_ranks: int = 1) -> None:
    """Run a reduced copy of the model over pages and by the library, on the CPU in float32.

    Args:
        num_ranks: among which the copy is divided, as the model is.
    Raises:
        UnsupportedModelError: the two differ, or one of them fails.
    """
    log.info("checking a reduced copy of %s, since its numbers may differ from the library's", config.architecture)
    failure = ""
    try:
        difference = _difference(config, num_ranks)
        if not difference < _TOLERANCE:
            where = "over pages" if num_ranks == 1 else f"over pages of {num_ranks} ranks"
            failure = f"its logits {where} differ from the library's by {difference:.1e} of their standard deviation"
    except Exception as error:  # the library's code, and that of checkpoints, may raise anything
        failure = f"its reduced copy cannot be computed ({type(error).__name__}: {error})"
    if failure and num_ranks > 1:
        failure += f"; --tp {num_ranks} may be the cause: leave it out"
    if failure:
        raise UnsupportedModelError(f"{config.folder}: {config.architecture} cannot be served: {failure}")


@torch.inference_mode()
def _difference(config: TransformersConfig, num_ranks: int) -> float:
    model = _reduced_copy(config)
    generator = torch.Generator().manual_seed(0)
    requests = [torch.randint(0, _VOCAB_SIZE, (length,), generator=generator) for length in _LENGTHS]
    expected = [model(input_ids=request[None], use_cache=False).logits[0].float() for request in requests]
    hook = AttentionHook()
    model.set_attn_implementation(hook.name)
    freeze_rope(model)
    shape = observe_attention(model, config.folder, hook)
    assert all((layer.window or 0) < min(_LENGTHS) for layer in shape.layers), "its windows cannot be shortened"
    own = replace(config, num_layers=len(shape.layers), layer_attention=shape.layers, vocab_size=_VOCAB_SIZE)
    if num_ranks == 1:
        pack(model)
        found = _over_pages(TransformersModel(own, model, hook, torch.float32), requests)
    else:
        found = _over_ranks(own, model, requests, num_ranks)
    differences = [(one - other).abs().max() / other.std() for one, other in zip(found, expected, strict=True)]
    return max(float(difference) for difference in differences)


def _over_ranks(config: TransformersConfig, model: Any, requests: list[Tensor], num_ranks: int) -> list[Tensor]:
    """Return the logits after each token of each request, from a model that is divided among threads."""
    store = HashStore()

    def divide(shard: Shard) -> Callable[[], list[Tensor]]:
        hook, part = AttentionHook(), copy.deepcopy(model)
        part.set_attn_implementation(hook.name)
        plan = TpPlan(config, part, shard)
        plan.divide(part)

        @torch.inference_mode()
        def compute() -> list[Tensor]:
            group = open_group(store, shard, torch.device("cpu"), timeout_s=_TIMEOUT_S)
            plan.connect(part, group)
            return _over_pages(TransformersModel(config, part, hook, torch.float32, shard=shard, group=group), requests)

        return compute

    parts = [divide(Shard(rank, num_ranks)) for rank in range(num_ranks)]  # not in threads: one whole copy at a time
    with ThreadPoolExecutor(num_ranks) as threads:
        found = [threads.submit(compute) for compute in parts]
    errors = [error for future in found if (error := future.exception()) is not None]
    if errors:  # a rank that fails is lost to the others
        raise next((error for error in errors if not isinstance(error, RankLostError)), errors[0])
    return found[0].result()


def _over_pages(model: CausalModel, requests: list[Tensor]) -> list[Tensor]:
    """Return the logits after each token of each request."""
    config = model.config
    layout = config.layout(_PAGE_SIZE, "float32")
    num_pages = [layout.num_pages(length) for length in _LENGTHS]
    table = np.zeros((len(requests), max(num_pages)), np.int32)
    for row, count in enumerate(num_pages):
        table[row, :count] = np.arange(count)[::-1] + sum(num_pages[:row])
    pool = KVPool(layout, sum(num_pages))
    attention = make_attention("auto", pool, config.num_heads, model.attention_params)
    logits: list[list[Tensor]] = [[] for _ in requests]
    for step in _STEPS:
        hidden = _run(model, attention, table, requests, step)
        for (request, _, _), part in zip(step, hidden, strict=True):
            logits[request].append(model.logits(part))
    pool.close()
    return [torch.cat(parts) for parts in logits]


def _run(
    model: CausalModel,
    attention: AttentionBackend,
    table: NDArray[np.int32],
    requests: list[Tensor],
    step: tuple[tuple[int, int, int], ...],
) -> tuple[Tensor, ...]:
    """Run one step; return the hidden states of each row."""
    numbers, starts, num_new = (np.array(column, np.int64) for column in zip(*step, strict=True))
    batch = make_batch(RowArrays(starts, num_new, table[numbers], _PAGE_SIZE), torch.device("cpu"))
    tokens = torch.cat([requests[number][start : start + count] for number, start, count in step])
    hidden = model.hidden_states(tokens, batch.positions, attention.prepare(batch))
    rows: tuple[Tensor, ...] = hidden.split(num_new.tolist())
    return rows


# ---- the copy --------------------------------------------------------------------------------------------------------


def _reduced_copy(config: TransformersConfig) -> Any:
    """Return a small model with the layers of this one, eager attention, and random weights."""
    trust = config.trust_remote_code
    whole = load_library_config(config.folder, config.overrides, trust_remote_code=trust)
    kinds = _kinds_of_layers(
        make_on_meta(copy.deepcopy(whole), config.folder, AttentionHook(), trust_remote_code=trust), config
    )
    reduced = _reduce(whole, max(kinds.index(kind) for kind in kinds) + 1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        reduced, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def _kinds_of_layers(model: Any, config: TransformersConfig) -> list[object]:
    """Return what tells the layers apart: their attention, the shapes of their weights, and their switches."""
    (layers,) = (
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_layers
    )
    return [
        (
            attention,
            tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters()),
            tuple(
                (name, value)
                for module in layer.modules()
                for name, value in vars(module).items()
                if isinstance(value, bool | str | float)
            ),
        )
        for layer, attention in zip(layers, config.layers, strict=True)
    ]


def _reduce(config: Any, num_layers: int) -> Any:
    """Return the configuration with fewer layers, tokens and experts, and with short windows."""
    reduced = copy.deepcopy(config)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(reduced, name, value[:num_layers])
    reduced.num_hidden_layers = num_layers
    reduced.vocab_size = _VOCAB_SIZE
    if isinstance(getattr(config, "sliding_window", None), int):
        reduced.sliding_window = _WINDOW
    most = (getattr(config, "n_group", None) or 1) * 2 * (getattr(config, "num_experts_per_tok", None) or 1)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if isinstance(number := getattr(config, name, None), int):
            setattr(reduced, name, min(number, most))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(reduced, name, 0)
    return reduced
