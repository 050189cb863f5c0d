"""Threads for native code that calls itself deeply."""

import threading
from concurrent.futures import ThreadPoolExecutor

#: Address space of each stack; only the part that is used takes memory.
STACK_BYTES = 512 << 20
#: Bytes of a text that llguidance may compile on such a thread. It calls itself once for each rule, reference or level
#: of a grammar that leads to another, up to 700 bytes of stack for each byte of text, and exceeding the stack ends the
#: process.
MAX_GRAMMAR_BYTES = 512 << 10
#: Bounds llguidance's work on the lexer while it compiles a grammar; the work on each mask has a bound of its own. The
#: library's default is five times as large, and a regular expression of 30 characters reaches it.
LEXER_FUEL = 200_000


def deep_threads(count: int) -> ThreadPoolExecutor:
    """Return an executor of this many threads with large stacks, for compiling grammars."""
    executor = ThreadPoolExecutor(count, thread_name_prefix="grammar-compiler")
    all_run = threading.Barrier(count + 1)
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(count):
            executor.submit(all_run.wait)  # the executor starts a thread for each, since none is idle
        all_run.wait()
    finally:
        threading.stack_size(before)
    return executor
