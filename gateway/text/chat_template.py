"""Renders chats to the text of a prompt, as ``apply_chat_template`` of ``transformers`` does.

Templates come with checkpoints and are untrusted code: they run in Jinja's immutable sandbox, over plain JSON. The
environment (whitespace control, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop controls,
the ``generation`` tag) is the one that templates on the Hugging Face Hub expect.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, ErrorCode, RequestError, reason_of
from gateway.http.protocol.decoding import refuse, value_of_either
from gateway.http.protocol.native import TokenizeRequest
from gateway.http.protocol.openai import ChatCompletionRequest, ChatMessage, Part, ToolCall, ToolField
from gateway.text.output_parser import INVALID_JSON, NO_PARAMETERS

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_TEMPLATE_KWARGS = 256
#: Largest size of all tools of a request as JSON, in bytes.
MAX_TOOLS_BYTES = 1 << 20
#: Marks the end of the final message's content while a template renders it; templates may trim content.
END_MARK = "[[the final message continues here]]"
#: A chat with two system messages. Some templates refuse the second one or leave it out, DeepSeek-R1's the first one.
#: The second one follows an answer. Behind a question, Gemma 3's template would take it for the answer.
FIRST_SYSTEM, LATE_SYSTEM = "[[the first system message]]", "[[a later system message]]"
LATE_SYSTEM_CHAT = (
    {"role": "system", "content": FIRST_SYSTEM},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "system", "content": LATE_SYSTEM},
    {"role": "user", "content": "d"},
)
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *TOKEN_NAMES})

ChatBody = ChatCompletionRequest | TokenizeRequest

_SHORT_IDS = re.compile(r"\|\s*length\s*(?:!=|<)\s*9\b")
_NULL_CONTENT = re.compile(r"\bmessage(?:\.content|\[['\"]content['\"]\])\s+is\s+none\b(?!\s+or\b)")
_THINKING = re.compile(r"\bmessage(?:\.thinking\b|\[['\"]thinking['\"]\])")
_UNDEFINED = re.compile(r"'\w+' is undefined")


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a template expects of messages beyond the usual, as its source shows.

    Attributes:
        has_calls: it shows the calls of earlier turns.
        has_short_ids: ids of calls have nine letters and digits; the template refuses others, or shorter ones
            (Mistral's).
        has_null_content: the content of a turn of calls alone is null, by which the template knows it (DeepSeek's).
        has_thinking: reasoning is named ``thinking`` (gpt-oss's).
    """

    has_calls: bool
    has_short_ids: bool
    has_null_content: bool
    has_thinking: bool

    @classmethod
    def of(cls, source: str) -> "MessageForm":
        return cls(
            has_calls="tool_calls" in source,
            has_short_ids=bool(_SHORT_IDS.search(source)),
            has_null_content=bool(_NULL_CONTENT.search(source)),
            has_thinking=bool(_THINKING.search(source)),
        )


class _Generation(Extension):
    """``{% generation %}`` marks training targets; here it renders its body and does nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """A compiled template with the special tokens that it may use.

    Args:
        special_tokens: by name, such as ``bos_token``, as text.
        place: where the template stands, for errors.
        with_tools: the template for requests with tools, of models that have two; None: this one.

    Attributes:
        source: its text, from which the formats of tool calls and reasoning are recognised.
        form: what it expects of messages.
        shows_late_system: it shows system messages behind the first message, and the first one with them.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        place: str = "the chat template",
        with_tools: "ChatTemplate | None" = None,
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            message = f"{place} does not parse as a Jinja template, at line {error.lineno}: {error}"
            raise ConfigError(f"{message}; correct it, or give another file as --chat-template") from error
        self.source = source
        self.form = MessageForm.of(source)
        self.with_tools = with_tools
        self._special_tokens = dict(special_tokens)
        self.shows_late_system = self._shows_late_system()

    @classmethod
    def load(cls, folder: Path, file: Path | None = None) -> "ChatTemplate | None":
        """Load ``file``, or the templates of a folder; None without one.

        Raises ConfigError: it cannot be read, or does not parse.
        """
        config = _tokenizer_config(folder)
        tokens = _special_tokens(config)
        if file is not None:
            place = f"--chat-template {file}"
            return cls(_read_template(file, place), tokens, place)
        sources = _template_files(folder) or _named_templates(folder, config)
        if "default" not in sources:
            return None
        place, source = sources["default"]
        tool_use = sources.get("tool_use")
        return cls(source, tokens, place, None if tool_use is None else cls(tool_use[1], tokens, tool_use[0]))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises RequestError if the template refuses these messages.

        Args:
            variables: what the template sees beside the messages, such as ``tools`` and ``enable_thinking``.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        try:
            return self._template.render(
                {**values, "messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except Exception as error:  # untrusted code may raise anything
            what, remedy = "them", ""
            if _UNDEFINED.fullmatch(str(error)):
                remedy = "; chat_template_kwargs can define it"
            elif not self.form.has_calls and any(message.get("tool_calls") for message in messages):
                what = "tool calls of earlier turns"
            text = f"the model's chat template cannot render {what}: {error}{remedy}"
            raise refuse(text, "messages") from error

    def _shows_late_system(self) -> bool:
        try:
            text = self.render(LATE_SYSTEM_CHAT)
        except RequestError:
            return False
        return FIRST_SYSTEM in text and LATE_SYSTEM in text


def _read_template(file: Path, place: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place} cannot be read: {reason_of(error)}") from error


def _template_files(folder: Path) -> dict[str, tuple[str, str]]:
    """Where the templates stand that have files of their own, and their texts, by name."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    return {name: (str(file), _read_template(file, str(file))) for name, file in files.items() if file.is_file()}


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The same of the templates in ``tokenizer_config.json``: one, or a list of templates with names."""
    found = config.get("chat_template")
    entries = found if isinstance(found, list) else [{"name": "default", "template": found}]
    texts = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    place = f"chat_template in {folder / 'tokenizer_config.json'}"
    return {name: (place, text) for name, text in texts.items() if isinstance(text, str)}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """The settings of a folder's tokenizer. Raises ConfigError: a file cannot be read."""
    config = _read_object(folder, "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    # Older versions of transformers wrote special tokens into a file of their own, which it prefers here, too.
    return {**config, **_read_object(folder, "special_tokens_map.json")}


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--model {folder}: {name} cannot be read: {reason_of(error)}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens of a folder's tokenizer, by name. Raises ConfigError: a file cannot be read."""
    return _special_tokens(_tokenizer_config(folder))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is written as a string or as an object with ``content``."""
    tokens: dict[str, str] = {}
    for name in TOKEN_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


# ---- chats -----------------------------------------------------------------------------------------------------------


def render_chat(template: ChatTemplate, body: ChatBody) -> str:
    """The text of a prompt. Raises RequestError."""
    _check_chat(body)
    messages, variables = body.messages or [], _variables(body)
    if "tools" in variables:
        template = template.with_tools or template
    plain = [_plain_message(message, template.form, f"messages[{i}]") for i, message in enumerate(messages)]
    if not template.shows_late_system:
        plain = _without_late_system(plain)
    if body.continue_final_message:
        plain[-1]["content"] = (plain[-1]["content"] or "") + END_MARK
        return _cut_at_end_mark(_rendered(template, plain, variables, add_generation_prompt=False))
    return _rendered(template, plain, variables, add_generation_prompt=body.add_generation_prompt is not False)


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
) -> str:
    """The text of a prompt. What the template refuses is rendered again in other forms, those with fewer changes first.

    Raises RequestError: the template refuses all forms; it says why it refuses the first one.
    """
    try:
        return template.render(messages, variables, add_generation_prompt=add_generation_prompt)
    except RequestError as error:
        refusal = error
    single = _with_single_calls(messages)
    both = _with_joined_neighbours(single)
    tried = [messages]
    opened = _with_first_user(both)
    forms = (_with_joined_neighbours(messages), single, both, _without_first_system(both), opened)
    for form in (*forms, _without_first_system(opened)):
        if form not in tried:
            tried.append(form)
            with suppress(RequestError):
                return template.render(form, variables, add_generation_prompt=add_generation_prompt)
    raise refusal


def num_parts(body: ChatBody) -> int:
    """Messages, parts of messages, calls of earlier turns, and documents: the work of rendering."""
    messages = body.messages or []
    parts = sum(len(message.content) if isinstance(message.content, list) else 1 for message in messages)
    return parts + sum(len(message.tool_calls or ()) for message in messages) + len(body.documents or [])


def argument_texts(body: ChatBody) -> list[str]:
    """Arguments of calls of earlier turns that are JSON text, which rendering decodes."""
    calls = [call for message in body.messages or () for call in message.tool_calls or ()]
    return [call.function.arguments for call in calls if isinstance(call.function.arguments, str)]


def tools_size(body: ChatBody) -> int:
    """Bytes of all tools as JSON. Raises RequestError if they are too large."""
    size = len(msgspec.json.encode(body.tools)) if body.tools else 0
    if size > MAX_TOOLS_BYTES:
        raise refuse(f"have {size} bytes in all, at most {MAX_TOOLS_BYTES} are allowed", "tools")
    return size


def _check_chat(body: ChatBody) -> None:
    """Refuse what no template could render."""
    if not body.messages:
        raise refuse("must not be empty", "messages")
    kwargs = body.chat_template_kwargs or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise refuse(f"has {len(kwargs)} entries, at most {MAX_TEMPLATE_KWARGS} are allowed", "chat_template_kwargs")
    for name in kwargs:
        if name in RESERVED:
            raise refuse(f"{name} cannot be set here", "chat_template_kwargs")
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise refuse("must be false with continue_final_message", "add_generation_prompt")
        if body.messages[-1].role != "assistant" or not body.messages[-1].content:
            raise refuse("the final message must be an assistant message with content", "continue_final_message")


def _variables(body: ChatBody) -> dict[str, Any]:
    """What the template sees beside the messages; ``chat_template_kwargs`` override what other fields imply."""
    variables: dict[str, Any] = {}
    choice, effort, thinking = None, None, None
    if isinstance(body, ChatCompletionRequest):
        choice, effort, thinking = body.tool_choice, body.reasoning_effort, body.thinking
    if body.tools and choice != "none":
        variables["tools"] = [_plain_tool(field) for field in body.tools]
    if body.documents:
        variables["documents"] = body.documents
    if effort is not None or thinking is not None:
        is_thinking = effort != "none" and (thinking is None or thinking.type != "disabled")
        variables["enable_thinking"] = variables["thinking"] = is_thinking  # of Qwen's and of DeepSeek's templates
        if is_thinking and effort is not None:
            variables["reasoning_effort"] = effort
    return {**variables, **(body.chat_template_kwargs or {})}


def _plain_tool(field: ToolField) -> dict[str, Any]:
    """A tool as templates expect it: with a description, which gpt-oss's needs, and with parameters."""
    function = field.function
    plain: dict[str, Any] = {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or NO_PARAMETERS,
    }
    if function.strict is not None:
        plain["strict"] = function.strict
    return {"type": "function", "function": plain}


def _plain_message(message: ChatMessage, form: MessageForm, param: str) -> dict[str, Any]:
    """A message as the template expects it: text parts joined, absent fields left out."""
    _check_message(message, param)
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name for the same role
    content = _content(message, param)
    is_of_calls_alone = bool(message.tool_calls) and not content
    plain: dict[str, Any] = {"role": role, "content": None if is_of_calls_alone and form.has_null_content else content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = _call_id(message.tool_call_id, form)
    reasoning = message.reasoning_content
    if message.reasoning is not None:
        reasoning = value_of_either(message, "reasoning_content", "reasoning", f"{param}.")
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
        if form.has_thinking and (is_of_calls_alone or not message.tool_calls):
            plain["thinking"] = reasoning  # with calls and content the template refuses it
    return plain


def _without_late_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make each system message behind the first message the end of the message before it.

    Behind an assistant message it becomes a message of the user. User messages right behind it are joined to it, so
    that the roles alternate as before.
    """
    groups = [[messages[0]]]
    for message in messages[1:]:
        role, first = message["role"], groups[-1][0]["role"]
        is_users = first == "user" or (first == "system" and len(groups) > 1)
        has_late = is_users and any(other["role"] == "system" for other in groups[-1])
        if (role == "system" and first != "assistant") or (role == "user" and has_late):
            groups[-1].append(message)
        else:
            groups.append([message])
    for i, (message, *others) in enumerate(groups):
        if others:
            message["content"] = "\n\n".join([message["content"], *(other["content"] for other in others)])
        if i and message["role"] == "system":
            message["role"] = "user"
    return [group[0] for group in groups]


def _with_joined_neighbours(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring messages of one role, as Mistral's own library does, and a user's to a tool's result before it.

    The templates of Mistral and Gemma demand that user and assistant alternate. Messages with calls stay as they are.
    """
    groups = [[messages[0]]]
    for message in messages[1:]:
        first = groups[-1][0]
        roles, has_calls = (first["role"], message["role"]), "tool_calls" in first or "tool_calls" in message
        if roles in (("user", "user"), ("tool", "user"), ("assistant", "assistant")) and not has_calls:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [
        {**first, "content": "\n\n".join([first["content"], *(other["content"] for other in others)])}
        if others
        else first
        for first, *others in groups
    ]


def _with_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make each call of an earlier turn a message of its own, with its result behind it, as Llama 3.1 demands."""
    groups: list[list[dict[str, Any]]] = [[]]
    by_call: dict[str | None, list[dict[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool":
            by_call.get(message.get("tool_call_id"), groups[-1]).append(message)
            continue
        calls = message.get("tool_calls", ())
        if not calls:
            groups.append([message])
        for i, call in enumerate(calls):
            turn = {"role": "assistant", "content": ""} if i else message
            groups.append([{**turn, "tool_calls": [call]}])
            by_call[call.get("id")] = groups[-1]
    return [message for group in groups for message in group]


def _with_first_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put an empty user message before a greeting of the assistant, which the templates of Mistral and Gemma refuse."""
    start = 1 if messages[0]["role"] == "system" else 0
    if [message["role"] for message in messages[start : start + 1]] != ["assistant"]:
        return list(messages)
    return [*messages[:start], {"role": "user", "content": ""}, *messages[start:]]


def _without_first_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a first system message the beginning of the user message behind it, as Gemma 2's template knows no other."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return list(messages)
    system, user, *others = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *others]


def _check_message(message: ChatMessage, param: str) -> None:
    if message.function_call is not None:
        raise refuse("not supported by this server; use tool_calls", f"{param}.function_call", ErrorCode.NOT_SUPPORTED)
    if message.audio is not None:
        raise refuse("only text is supported", f"{param}.audio", ErrorCode.NOT_SUPPORTED)
    if message.tool_calls and message.role != "assistant":
        raise refuse("only assistant messages have tool calls", f"{param}.tool_calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise refuse("only tool messages have it", f"{param}.tool_call_id")


def _content(message: ChatMessage, param: str) -> str:
    content = message.content
    if isinstance(content, list):
        return "\n".join(_part_text(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    if content is None:
        if message.role not in ("assistant", "tool"):  # a turn may be calls or a refusal alone, a tool without a result
            raise refuse("must be a string or text parts", f"{param}.content")
        return message.refusal or ""
    return content


def _part_text(part: Part, param: str) -> str:
    if part.type not in ("text", "refusal"):
        raise refuse(f"{part.type[:100]!r} is not supported; only text is", f"{param}.type", ErrorCode.NOT_SUPPORTED)
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise refuse("is missing", f"{param}.{part.type}")
    return text


class _Arguments(dict[str, Any]):
    """Arguments of a call: an object, which is JSON text where a template joins it to text.

    Args:
        text: the JSON as the client sent it.
    """

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _arguments(given: str | dict[str, Any] | None) -> _Arguments:
    """Arguments as templates expect them. Many refuse text that is no JSON object, such as arguments cut off."""
    if isinstance(given, dict):
        return _Arguments(given, _tojson(given))
    text = (given or "").strip() or "{}"
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return _Arguments(parsed if isinstance(parsed, dict) else {INVALID_JSON: given}, text)


def _call_id(given: str, form: MessageForm) -> str:
    """The id of a call; where the template asks for short ones, a hash of it, unless it has their form already."""
    if not form.has_short_ids or (len(given) == 9 and given.isascii() and given.isalnum()):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]


def _plain_call(call: ToolCall, form: MessageForm) -> dict[str, Any]:
    """A tool call as the template expects it, with its arguments as an object."""
    arguments = _arguments(call.function.arguments)
    plain: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        plain["id"] = _call_id(call.id, form)
    return plain


def _cut_at_end_mark(text: str) -> str:
    """The rendered text up to the end of the final message's content, which the answer continues."""
    end = text.rfind(END_MARK)
    if end < 0:
        raise refuse("the model's chat template does not show the final message", "continue_final_message")
    return text[:end]
