"""Compiles grammars with llguidance, for the vocabulary of a checkpoint.

A grammar is compiled on a thread, as soon as its request arrives, and its request has no row in a step before that is
done (``common/scheduling/grammar_queue.py``). End tokens are allowed exactly where a grammar may end, and forced where
it must.

llguidance is imported where a grammar needs it, since the engine also runs on machines without it.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import ErrorCode, RequestError
from common.model_folder import TOKENIZER_FILE
from common.system.deep_threads import LEXER_FUEL, deep_threads

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars that a node keeps although no request has them, and the characters of their texts together: one of
#: 90 KB can take 40 MB, and a lexer grows with the outputs that follow it, to 115 MB.
MAX_UNUSED, MAX_UNUSED_CHARS = 32, 512 * 1024
NUM_COMPILE_THREADS = 2


class GrammarCompiler:
    """Compiles grammars on threads, and keeps those in use and those that were used last.

    Args:
        tokenizer: None if grammars cannot be followed here.
        known_ids: token ids of the tokenizer, ascending.
        refusal: why grammars cannot be followed here, as a sentence.
    """

    def __init__(self, tokenizer: "LLTokenizer | None", known_ids: NDArray[np.int64], *, refusal: str = "") -> None:
        self._tokenizer = tokenizer
        self._refusal = refusal
        self.known_ids = known_ids
        self._threads = deep_threads(NUM_COMPILE_THREADS)
        self._lock = threading.Lock()  # the event loop asks, the engine's thread needs the result
        self._in_use: dict[str, Future[LLMatcher]] = {}
        self._unused: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._renewed: set[str] = set()  # those that are being compiled again

    @classmethod
    def refusing(cls, refusal: str) -> "GrammarCompiler":
        """Return a compiler that refuses every grammar with this sentence."""
        return cls(None, np.empty(0, np.int64), refusal=refusal)

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Return the grammar in its initial state, perhaps in the future. It stays compiled until ``drop``.

        The result is shared and must not be changed. It raises a ``RequestError`` for a grammar that is not valid.
        """
        with self._lock:
            found = self._in_use.get(grammar)
            if found is None:
                found = self._unused.pop(grammar, None) or self._threads.submit(self._compile, grammar)
                self._in_use[grammar] = found
            return found

    def compiled(self, grammar: str) -> "LLMatcher | None":
        """Return a grammar that has been compiled; never waits.

        None: it has been forgotten, since its last request ended after the step was planned. It may be compiled again
        by now, for a request that came later.
        """
        with self._lock:
            found = self._in_use.get(grammar) or self._unused.get(grammar)
        return found.result() if found is not None and found.done() else None

    def drop(self, grammar: str) -> None:
        """Note that no request has a grammar any more: it may be forgotten, and need not be compiled."""
        with self._lock:
            found = self._in_use.pop(grammar, None)
            if found is not None and not found.cancel() and grammar not in self._renewed:
                self._unused[grammar] = found
                self._forget_oldest()

    def renew(self, grammar: str) -> None:
        """Forget a grammar that an output could not follow any more, and compile it again if requests have it.

        All copies of a grammar share a lexer. Once it has exceeded a limit, every later request would fail too.
        """
        with self._lock:
            self._unused.pop(grammar, None)
            if grammar not in self._in_use or grammar in self._renewed:
                return
            self._renewed.add(grammar)
            work = self._threads.submit(self._compile, grammar)
        work.add_done_callback(functools.partial(self._replace, grammar))  # at once, if the work is done already

    def _replace(self, grammar: str, compiled: "Future[LLMatcher]") -> None:
        with self._lock:
            self._renewed.discard(grammar)
            if grammar in self._in_use and not compiled.cancelled() and compiled.exception() is None:
                self._in_use[grammar] = compiled

    def _forget_oldest(self) -> None:
        """Forget the grammars that were used longest ago, except those that are still compiled, if there are too many.

        One that is still compiled would be compiled twice.
        """
        done = iter([text for text, found in self._unused.items() if found.done()])
        while len(self._unused) > MAX_UNUSED or sum(map(len, self._unused)) > MAX_UNUSED_CHARS:
            oldest = next(done, None)
            if oldest is None:
                return
            del self._unused[oldest]

    def _compile(self, grammar: str) -> "LLMatcher":
        if self._tokenizer is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, self._refusal)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        check(matcher)
        matcher.compute_bitmask()  # the first mask is the slowest; copies share what it has found out
        check(matcher)
        return matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check(matcher: "LLMatcher") -> None:
    """Raise a ``RequestError`` if the grammar is invalid, has exceeded a limit, or does not allow the tokens so far."""
    if matcher.is_error():
        reason = matcher.get_error().split("\n", 1)[0][:300]
        raise RequestError(ErrorCode.INVALID_REQUEST, f"the grammar cannot be followed: {reason}")


def load_compiler(folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    """Return a compiler for the vocabulary of a checkpoint. Without a readable tokenizer it refuses every grammar."""
    eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
    if not eos_token_ids:
        return GrammarCompiler.refusing("the model has no end token, with which a grammar could end")
    try:
        import llguidance.numpy  # noqa: F401 (for masks: later, the process may be able to open no more files)
        from llguidance import LLTokenizer
    except ImportError:
        return GrammarCompiler.refusing("llguidance is not installed on the node, and grammars need it")
    try:
        text = (folder / TOKENIZER_FILE).read_text("utf-8")
        known = token_ids(text)
        if known.max(initial=0) >= vocab_size:
            text = _without_added_tokens(text, vocab_size)
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
    except FileNotFoundError:
        return GrammarCompiler.refusing(f"the node has no {TOKENIZER_FILE} beside its weights, which grammars need")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).split("\n", 1)[0][:200]
        return GrammarCompiler.refusing(f"the node cannot follow a grammar with this {TOKENIZER_FILE}: {reason}")
    return GrammarCompiler(tokenizer, known[known < vocab_size])


def token_ids(tokenizer_json: str) -> NDArray[np.int64]:
    """Return the ids of all tokens in the text of a ``tokenizer.json``, ascending."""
    content = json.loads(tokenizer_json)
    vocab = content["model"]["vocab"]  # a list by id in unigram models, else ids by token
    ids = set(vocab.values()) if isinstance(vocab, dict) else set(range(len(vocab)))
    ids.update(token["id"] for token in content.get("added_tokens", ()))
    return np.array(sorted(ids), np.int64)


def _without_added_tokens(tokenizer_json: str, first: int) -> str:
    """Return the text of a ``tokenizer.json`` without added tokens from an id on, which the model does not have.

    The tokenizer of Gemma 3 1B has a token for images. llguidance takes no tokenizer larger than the vocabulary.
    """
    content = json.loads(tokenizer_json)
    content["added_tokens"] = [token for token in content.get("added_tokens", ()) if token["id"] < first]
    return json.dumps(content)
