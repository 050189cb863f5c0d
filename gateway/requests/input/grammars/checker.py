"""Has grammars compiled by other processes before a node sees them, and keeps the results."""

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict

import msgspec

from common.errors import ErrorCode, RequestError
from common.system.exit_status import how_ended
from common.system.python_environ import python_environ
from gateway.http.protocol.decoding import refuse
from gateway.requests.input.structured_output import GrammarAnswer, StructuredOutput

NUM_PROCESSES = 2
#: Grammars that are kept with the results of their checks, those that still wait included: 128 MiB at most.
MAX_CHECKED = 256
#: Grammars that wait for a process or are in one; for further ones the client gets 429.
MAX_PENDING = 64
#: The longest time that a grammar waits for a process, and that it may take there.
MAX_WAIT_S, COMPILE_TIMEOUT_S = 20.0, 10.0
_COMPILER = "gateway.requests.input.grammars.compiler"
#: A line of an answer. A character of a Lark text may take six bytes.
_MAX_LINE_BYTES = 4 << 20
#: How a process ends on account of its grammar: it exceeded its time, its memory, or its stack.
_ENDINGS = {
    -signal.SIGALRM: f"takes more than {COMPILE_TIMEOUT_S:g} s to compile; simplify it",
    -signal.SIGABRT: "takes too much memory to compile; simplify it",
    -signal.SIGSEGV: "takes too large a stack to compile; simplify it",
}


class _Compiler:
    """A process of ``compiler``, started when it is needed. It checks one grammar at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def check(self, request: bytes, param: str) -> str | RequestError:
        """Return the Lark text, or why there is none. Raises RequestError if the process does not answer."""
        if self._process is None or self._process.returncode is not None:
            try:
                self._process = await _start()
            except OSError as error:
                message = f"{param}: no process can be started to compile it: {error.strerror}"
                raise RequestError(ErrorCode.INTERNAL, message, param=param) from error
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has ended, as the next line notices
            process.stdin.write(request + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            status = await process.wait()
            if status in _ENDINGS:
                raise refuse(_ENDINGS[status], param)
            raise RequestError(ErrorCode.INTERNAL, f"{param}: its compiler {how_ended(status)}", param=param)
        answer = msgspec.json.decode(line, type=GrammarAnswer)
        return answer.lark or RequestError(ErrorCode.INVALID_REQUEST, answer.problem, param=answer.param)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def _start() -> Process:
    # In a session of its own: Ctrl-C ends the gateway, whose end is the end of the input.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", _COMPILER, str(COMPILE_TIMEOUT_S), stdin=PIPE, stdout=PIPE, limit=_MAX_LINE_BYTES,
        env=python_environ(os.environ), start_new_session=True,
    )  # fmt: skip


class GrammarChecker:
    """Converts and checks grammars in other processes, each once at a time, and keeps the results used last.

    A tenant has at most one process at a time and half of the places of those that wait, since each of its grammars may
    take ``COMPILE_TIMEOUT_S``. Requests without a tenant have no such limit.
    """

    def __init__(self) -> None:
        self._compilers = [_Compiler() for _ in range(NUM_PROCESSES)]
        self._idle = list(self._compilers)
        self._served: set[str] = set()  # tenants with a grammar in a process
        self._freed = asyncio.Condition()
        self._checks: OrderedDict[bytes, asyncio.Task[str | RequestError]] = OrderedDict()
        self._pending: dict[asyncio.Task[str | RequestError], str] = {}  # their tenants

    async def close(self) -> None:
        """End the checks and the processes; no other check begins."""
        for check in self._pending:
            check.cancel()
        async with self._freed:
            await self._freed.wait_for(lambda: len(self._idle) == NUM_PROCESSES)
            self._idle.clear()
        for compiler in self._compilers:
            await compiler.close()

    async def check(self, wanted: StructuredOutput, tenant: str = "") -> str:
        """Return the Lark text for ``SamplingParams.grammar``.

        Raises:
            RequestError: naming the field, and the place in a schema, that is wrong or too large; or too many others
                are being compiled.
        """
        request = wanted.encoded()
        key = hashlib.sha256(request).digest()
        check = self._checks.get(key) or self._begin(key, request, wanted.param, tenant=tenant)
        self._checks.move_to_end(key)
        found = await asyncio.shield(check)
        if isinstance(found, RequestError):
            raise RequestError(found.code, found.message, param=found.param, retry_after_s=found.retry_after_s)
        return found

    def _begin(self, key: bytes, request: bytes, param: str, *, tenant: str) -> "asyncio.Task[str | RequestError]":
        tenants = list(self._pending.values())
        if len(tenants) >= MAX_PENDING or (tenant and tenants.count(tenant) >= MAX_PENDING // 2):
            raise self._crowded(param)
        check = self._checks[key] = asyncio.create_task(self._compiled(key, request, param, tenant=tenant))
        self._pending[check] = tenant
        check.add_done_callback(self._pending.pop)
        if len(self._checks) > MAX_CHECKED:
            self._checks.popitem(last=False)
        return check

    async def _compiled(self, key: bytes, request: bytes, param: str, *, tenant: str) -> str | RequestError:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                compiler = await self._take(tenant)
        except TimeoutError:
            self._checks.pop(key, None)
            return self._crowded(param)
        try:
            return await compiler.check(request, param)
        except RequestError as error:  # it is not kept: the machine may have stood still
            self._checks.pop(key, None)
            return error
        finally:
            await self._give_back(compiler, tenant)

    async def _take(self, tenant: str) -> _Compiler:
        """Wait for a process."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._idle and tenant not in self._served)
            if tenant:
                self._served.add(tenant)
            return self._idle.pop()

    async def _give_back(self, compiler: _Compiler, tenant: str) -> None:
        async with self._freed:
            self._idle.append(compiler)
            self._served.discard(tenant)
            self._freed.notify_all()

    def _crowded(self, param: str) -> RequestError:
        message = f"{param}: {len(self._pending)} grammars are being compiled; try again"
        return RequestError(ErrorCode.QUEUE_FULL, message, param=param, retry_after_s=1.0)
