"""``POST /v1/messages`` and the count of its tokens."""

from msgspec.structs import replace

from common.errors import RequestError
from gateway.http.protocol.anthropic import CountTokensRequest, MessagesRequest
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.http.translation.anthropic import field_names, to_chat
from gateway.http.translation.common import own_name, with_own_names
from gateway.requests.input.generate_request import GenerateRequest, in_pieces, prompt_only
from gateway.requests.input.input_processor import InputProcessor
from gateway.workers.served_models import ServedModel


class MessagesApi:
    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs

    async def process(
        self, body: MessagesRequest, model: ServedModel, tenant: str, message_id: str
    ) -> list[GenerateRequest]:
        """The request for the only output. Raises RequestError."""
        chat, names = _chat(body, model), field_names(body)
        try:
            requests = await self._inputs.chat(chat, model, tenant, message_id)
        except RequestError as error:
            raise with_own_names(error, names) from error
        return [
            _at_most(in_pieces(request, own_name(request.grammar_param, names)), body.max_tokens)
            for request in requests
        ]

    async def count_tokens(self, body: CountTokensRequest, model: ServedModel) -> int:
        """Tokens of the prompt that these messages become. Raises RequestError."""
        chat = _chat(body, model)
        try:
            return await self._inputs.count_tokens(model, chat)
        except RequestError as error:
            raise with_own_names(error, field_names(body)) from error


def _chat(body: CountTokensRequest, model: ServedModel) -> ChatCompletionRequest:
    chat = to_chat(body)
    if model.formats.reasoning is None or model.formats.covers_reasoning:
        chat.thinking_budget = None  # not of a model that does not think, or whose reasoning no token ends for good
    return chat


def _at_most(request: GenerateRequest, max_tokens: int) -> GenerateRequest:
    """The request with an upper bound of its output, which has been set to all that fits behind the prompt."""
    sampling = request.sampling._replace(max_new_tokens=max(min(request.sampling.max_new_tokens, max_tokens), 1))
    expected = min(request.expected_output, sampling.max_new_tokens)
    bounded = replace(request, sampling=sampling, expected_output=expected)
    return bounded if max_tokens else prompt_only(bounded)
