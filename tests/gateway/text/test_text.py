"""Incremental decoding equals decoding at once; no partial character and no part of a stop string is shown."""

import asyncio
import gc
import json
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.fake_nodes import CORPUS, EOS, TEMPLATE, make_tokenizer
from tokenizers import decoders, models

from common.errors import ConfigError, RequestError
from gateway.text.chat_template import ChatTemplate
from gateway.text.detokenizer import MAX_HELD_IDS, WindowDetokenizer
from gateway.text.stop_strings import StopMatcher
from gateway.text.tokenizer import LONG_CHARACTERS, AsyncTokenizer, Tokenizer

TOKENIZER = make_tokenizer()
TEXT = Tokenizer(TOKENIZER)
ids_of_any_kind = st.lists(st.integers(0, TEXT.vocab_size + 20), max_size=60)


def in_pieces(items, cuts):
    """A list cut at the given places."""
    places = sorted({min(cut, len(items)) for cut in cuts})
    return [items[start:end] for start, end in zip([0, *places], [*places, len(items)], strict=True)]


def detokenize(ids, cuts, skip_special):
    detokenizer = TEXT.detokenizer(skip_special=skip_special)
    return "".join(detokenizer.push(tuple(piece)) for piece in in_pieces(ids, cuts)) + detokenizer.flush()


@settings(deadline=None)
@given(ids_of_any_kind, st.lists(st.integers(0, 60), max_size=60), st.booleans())
def test_incremental_text_equals_the_text_of_all_ids(ids, cuts, skip_special):
    assert detokenize(ids, cuts, skip_special) == TEXT.decode(ids, skip_special=skip_special)


@settings(deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=60))
def test_text_survives_a_round_trip(text, cuts):
    ids = TEXT.encode(text, add_special_tokens=False)
    assert detokenize(ids, cuts, False) == text


def test_a_character_of_four_bytes_is_shown_with_its_last_byte():
    ids = [TOKENIZER.token_to_id(piece) for piece in ("ð", "Ł", "ļ", "Ģ")]  # f0 9f 9a 80, the rocket
    assert None not in ids
    detokenizer = TEXT.detokenizer(skip_special=True)
    assert [detokenizer.push((token,)) for token in ids] == ["", "", "", "🚀"]
    assert detokenizer.flush() == ""


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character():
    detokenizer = TEXT.detokenizer(skip_special=True)
    assert detokenizer.push((TOKENIZER.token_to_id("ð"), TOKENIZER.token_to_id("Ł"))) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_skipped_and_unknown_ids_have_no_text():
    ids = (*TEXT.encode("ab", add_special_tokens=False), TOKENIZER.token_to_id(EOS), 100_000, 2**40)
    assert TEXT.detokenizer(skip_special=True).push(ids) == "ab"
    assert TEXT.detokenizer(skip_special=False).push(ids) == "ab" + EOS
    assert TEXT.piece(2**40) == b""


def sentencepiece_tokenizer():
    """A tokenizer with tokens for words, for bytes (3 to 6) and, as token 8, a special one."""
    vocabulary = {"▁a": 0, "▁b": 1, "c": 2, "<0xF0>": 3, "<0x9F>": 4, "<0x9A>": 5, "<0x80>": 6, "<unk>": 7}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_a_tokenizer_that_is_not_byte_level_is_decoded_in_a_window():
    text = Tokenizer(sentencepiece_tokenizer())
    detokenizer = text.detokenizer(skip_special=True)
    ids = [0, 1, 2, 3, 4, 5, 6, 0]
    assert [detokenizer.push((token,)) for token in ids] == ["a", " b", "c", "", "", "", "🚀", " a"]
    assert detokenizer.flush() == ""
    assert text.decode(ids, skip_special=True) == "a bc🚀 a"


@pytest.mark.parametrize("silent", [(), (8,)], ids=["nothing", "a special token"])
def test_the_space_behind_a_flush_is_kept(silent):
    detokenizer = Tokenizer(sentencepiece_tokenizer()).detokenizer(skip_special=True)
    assert detokenizer.push((0,)) + detokenizer.push(silent) == "a"
    assert [detokenizer.flush(), detokenizer.flush(), detokenizer.push((1,))] == ["", "", " b"]


@pytest.mark.parametrize("before", [[0], [8, 0, 1], [8, 2], [1] * 20])
def test_an_output_that_continues_a_text_begins_with_the_space_between_them(before):
    detokenizer = Tokenizer(sentencepiece_tokenizer()).detokenizer(before, skip_special=True)
    assert [detokenizer.push((token,)) for token in (1, 2, 0)] == [" b", "c", " a"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("before", [[], [8], [0, 3, 4]], ids=["none", "special", "within a character"])
def test_an_output_behind_no_text_begins_without_a_space(before):
    detokenizer = Tokenizer(sentencepiece_tokenizer()).detokenizer(before, skip_special=True)
    assert [detokenizer.push((token,)) for token in (1, 2, 0)] == ["b", "c", " a"]


def test_the_bytes_of_tokens_make_the_text_if_the_tokenizer_is_not_byte_level():
    text = Tokenizer(sentencepiece_tokenizer())
    assert [text.piece(token) for token in (0, 2, 3, 6, 8)] == [b" a", b"c", b"\xf0", b"\x80", b"<s>"]
    assert b"".join(map(text.piece, (0, 2, 3, 4, 5, 6))).decode() == " ac🚀"
    assert text.piece(2**31) == b""


@pytest.mark.parametrize("silent", [0, 40])
@pytest.mark.parametrize("size", [1, 3, 4, 17, 40])
def test_a_window_shows_whole_characters_whatever_comes_in_one_push(size, silent):
    text = Tokenizer(sentencepiece_tokenizer())
    detokenizer = text.detokenizer(skip_special=True)
    ids = [0, *[8] * silent, *[3, 4, 5, 6] * 20, 1]
    shown = [detokenizer.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join(shown) + detokenizer.flush() == "a" + "🚀" * 20 + " b"


@pytest.mark.parametrize(("token", "shown"), [(6, "\ufffd"), (8, "")], ids=["no character", "special"])
def test_the_window_stays_small_where_no_text_becomes_complete(token, shown):
    tokenizer = sentencepiece_tokenizer()
    sizes = []

    def decode(ids, *, skip_special_tokens):
        sizes.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = WindowDetokenizer(SimpleNamespace(decode=decode), skip_special=True)
    ids = [0, *[token] * 100, 1]
    text = "".join([detokenizer.push((one,)) for one in ids]) + detokenizer.flush()
    assert text == tokenizer.decode(ids) == "a" + 100 * shown + " b"
    assert max(sizes) <= 2 * (MAX_HELD_IDS + 1)


def test_invalid_unicode_is_refused():
    with pytest.raises(RequestError) as caught:
        TEXT.encode("\ud800", add_special_tokens=False, param="prompt")
    assert caught.value.param == "prompt"


# ---- stop strings --------------------------------------------------------------------------------


def cut_by_definition(text, stops):
    """Character by character: the first complete stop string ends the text before itself, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 30), max_size=30),
)
def test_the_shown_text_does_not_depend_on_the_cuts(text, stops, cuts):
    matcher = StopMatcher(stops)
    shown = ""
    expected, matched = cut_by_definition(text, stops)
    for piece in in_pieces(text, cuts):
        shown += matcher.push(piece)
        assert expected.startswith(shown)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, matched)


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(text) for text in ("one <", "/", "b>", " two</en")] == ["one ", "", "</b>", " two"]
    assert matcher.flush() == "</en"


# ---- the chat template --------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": "Who <b>are</b> you? 你好"},
    {"role": "assistant", "content": "A model.", "reasoning_content": "hm"},
    {"role": "user", "content": "Thanks!"},
]
TRICKY = """{%- set ns = namespace(count=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- elif message.role == 'system' %}
        {{- dict(message) | tojson(indent=2) }}
        {%- continue %}
    {%- else %}
        {{- message.content.split('?')[0].strip() }} {{ message.content | tojson }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
  {% if enable_thinking is defined and enable_thinking is false %}
no thinking
  {% endif %}
{{ ns.count }} {{ strftime_now('%Y') }}{% if add_generation_prompt %} go{% endif %}
{% if tools %}tools{% endif %}
"""
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": EOS}


@pytest.mark.parametrize("template", [TEMPLATE, TRICKY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_a_chat_is_rendered_as_transformers_renders_it(template, add_generation_prompt, kwargs):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **SPECIAL)
    expected = reference.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
    )
    chat = ChatTemplate(template, SPECIAL)
    assert chat.render(CHAT, kwargs, add_generation_prompt=add_generation_prompt) == expected
    ids = reference.apply_chat_template(
        CHAT, chat_template=template, add_generation_prompt=add_generation_prompt, return_dict=False, **kwargs
    )
    assert TEXT.encode(expected, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[99].content.nothing }}",
    ],
)
def test_an_error_in_a_template_is_a_client_error(template):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(template, {}).render(CHAT)
    assert caught.value.param == "messages"
    assert caught.value.status == 400


def test_a_template_that_does_not_parse_is_refused_with_its_file_and_line(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "a\\n{% if %}"}')
    with pytest.raises(ConfigError, match=r"^chat_template in .*tokenizer_config\.json does not parse .*, at line 2"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{")
    with pytest.raises(ConfigError, match=r"jinja does not parse .* give another file as --chat-template$"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"eos_token": "\xff"}'),
        ("tokenizer_config.json", b'{"chat_template": ' + b"[" * 100_000),
    ],
)
def test_files_that_hold_no_text_or_no_json_are_refused_by_name(tmp_path, file, content):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file} cannot be read"):
        ChatTemplate.load(tmp_path)


def test_a_list_of_templates_may_hold_anything_beside_the_default_one(tmp_path):
    named = '{"name": "default", "template": "found"}'
    for others in ('"a", 5, {"name": []}', '{"name": "rag"}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": [{others}, {named}]}}')
        assert ChatTemplate.load(tmp_path).render(CHAT) == "found"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}')
    assert ChatTemplate.load(tmp_path) is None


def test_a_tokenizer_with_an_id_that_would_take_gigabytes_of_tables_is_refused(tmp_path):
    highest = '"<|highest|>": 2147483647'
    text = make_tokenizer().to_str().replace('"vocab":{', f'"vocab":{{{highest},')
    assert highest in text
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: it has the token id 2147483647, and"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("more", "shown"), [({}, "<s></s>"), ({"added_tokens_decoder": {}}, "<b></s>")])
def test_templates_have_the_special_tokens_of_a_file_of_their_own(tmp_path, more, shown):
    """As older versions of transformers wrote them, without ``added_tokens_decoder``."""
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<b>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more))
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>", "lstrip": false}}')
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(CHAT) == shown


def test_corpus_is_what_the_tokenizer_was_made_of():
    assert all(TEXT.decode(TEXT.encode(line, add_special_tokens=True), skip_special=False) == line for line in CORPUS)


async def test_other_texts_do_not_wait_for_a_huge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, may_end = AsyncTokenizer(), threading.Event()
    huge = asyncio.ensure_future(tokenizer.on_thread(may_end.wait, is_huge=True))
    long_text = "To be " * 3_000
    assert len(long_text) > LONG_CHARACTERS
    assert await tokenizer.tokenize(TEXT, long_text, add_special_tokens=False, param="prompt")
    assert not huge.done()
    monkeypatch.setattr("gateway.text.tokenizer.HUGE_CHARACTERS", len(long_text) - 1)
    monkeypatch.setattr("gateway.text.tokenizer.HUGE_IDS", 9_000)
    behind = [
        asyncio.ensure_future(tokenizer.tokenize(TEXT, long_text, add_special_tokens=False, param="prompt")),
        asyncio.ensure_future(tokenizer.detokenize(TEXT, [[]] * 600, skip_special=False)),
    ]
    assert await tokenizer.detokenize(TEXT, [[1]] * 500, skip_special=False)
    assert not any(one.done() for one in behind)
    may_end.set()
    await asyncio.gather(huge, *behind)
    tokenizer.close()


async def test_the_text_of_a_request_whose_client_has_left_does_not_wait_for_the_thread() -> None:
    tokenizer, may_end = AsyncTokenizer(), threading.Event()
    busy = asyncio.ensure_future(tokenizer.on_thread(may_end.wait))
    text = {"of a request"}  # of which there can be weak references
    left = asyncio.ensure_future(tokenizer.on_thread(partial(str, text)))
    await asyncio.sleep(0)
    kept = weakref.ref(text)
    left.cancel()
    await asyncio.wait([left])
    del text, left
    gc.collect()
    is_kept = kept() is not None
    may_end.set()
    await busy
    tokenizer.close()
    assert not is_kept
