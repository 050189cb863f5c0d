"""Text to tokens and back."""

from itertools import chain
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from gateway.http.access.request_checks import RequestChecks
from gateway.http.formatters.common import encode_json, ignored_header
from gateway.http.json_response import JsonResponse
from gateway.http.openapi.answers import Detokenized, Tokenized, TokenizerInfo
from gateway.http.openapi.operations import described
from gateway.http.protocol.decoding import decode, decode_with_extras, refuse
from gateway.http.protocol.native import DetokenizeRequest, TokenizeRequest
from gateway.http.services import Services
from gateway.requests.input.prompts import check_vocabulary
from gateway.workers.served_models import ServedModel

#: Token ids that are encoded at once; more are encoded on the tokenizer's thread.
MANY_IDS = 1 << 16


def make_router(services: Services, checks: RequestChecks) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **described(Tokenized, TokenizeRequest, summary="Turn text into token ids"))
    async def tokenize(data: Annotated[bytes, Depends(checks.body)]) -> Response:
        body, ignored = decode_with_extras(TokenizeRequest, data, are_refused=services.config.strict_fields)
        model = services.models.named(body.model)
        ids, is_batch = await _encode(services, model, body)
        counts = [len(tokens) for tokens in ids]
        shown: list[Any] = ids
        if sum(counts) > MANY_IDS:
            shown = await services.tokenizer.on_thread(lambda: [_encoded(tokens) for tokens in ids])
        answer = Tokenized(
            tokens=shown if is_batch else shown[0],
            count=counts if is_batch else counts[0],
            max_model_len=model.context_length,
        )
        return JsonResponse(answer, headers=ignored_header(ignored))

    @router.post("/detokenize", **described(Detokenized, DetokenizeRequest, summary="Turn token ids into text"))
    async def detokenize(data: Annotated[bytes, Depends(checks.body)]) -> Response:
        body = decode(DetokenizeRequest, data)
        model = services.models.named(body.model)
        tokens: list[Any] = body.tokens
        is_batch = bool(tokens) and isinstance(tokens[0], list)
        if len(set(map(type, tokens))) > 1:
            raise refuse("token ids and lists of token ids cannot be mixed", "tokens")
        limits = model.pool.registry.accepted
        vocab_size = model.tokenizer.vocab_size if limits is None else limits.vocab_size
        check_vocabulary(list(chain.from_iterable(tokens)) if is_batch else tokens, vocab_size, "tokens")
        lists = tokens if is_batch else [tokens]
        texts = await services.tokenizer.detokenize(model.tokenizer, lists, body.skip_special_tokens)
        answer = texts if is_batch else texts[0]
        return JsonResponse(Detokenized(text=answer, prompt=answer))

    @router.get(
        "/tokenizer_info",
        **described(TokenizerInfo, summary="Special tokens and chat template (vLLM)", errors=(503,)),
    )
    async def tokenizer_info(model: str | None = None) -> Response:
        served = services.models.named(model)
        template = served.chat_template
        answer = TokenizerInfo(
            bos_token=served.special_tokens.get("bos_token"),
            eos_token=served.special_tokens.get("eos_token"),
            pad_token=served.special_tokens.get("pad_token"),
            unk_token=served.special_tokens.get("unk_token"),
            chat_template=None if template is None else template.source,
        )
        return JsonResponse(answer)

    return router


def _encoded(ids: list[int]) -> msgspec.Raw:
    """Token ids in JSON. They are encoded in pieces, between which the event loop has a turn."""
    pieces = [encode_json(ids[start : start + MANY_IDS])[1:-1] for start in range(0, len(ids), MANY_IDS)]
    return msgspec.Raw(b"[%b]" % b",".join(pieces))


async def _encode(services: Services, model: ServedModel, body: TokenizeRequest) -> tuple[list[list[int]], bool]:
    """The token ids of each text of a body, and whether the body has a list of texts."""
    given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise refuse("give exactly one of prompt, text and messages", "prompt")
    if body.messages is not None:
        texts, special = [await services.inputs.render(model, body)], bool(body.add_special_tokens)
    else:
        single = body.prompt if body.prompt is not None else body.text
        texts, special = single if isinstance(single, list) else [single or ""], body.add_special_tokens is not False
    tokenize, param = services.tokenizer.tokenize, given[0]
    ids = [await tokenize(model.tokenizer, text, add_special_tokens=special, param=param) for text in texts]
    return ids, isinstance(getattr(body, param), list) and body.messages is None
