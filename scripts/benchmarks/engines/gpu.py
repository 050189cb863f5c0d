"""The engine, its kernels, transfers and the whole service on one GPU, each against the limit of the device.

Limits are measured in the same run: memory bandwidth, and the fastest matrix product. A decode step must read the
weights and the KV of its context once; a prompt must be multiplied by the weights. Attention is compared with
flash-attn, where that is installed, and with torch's own. On CUDA the last lines say which goals are reached.
``--json`` writes all figures. Items are measured cheapest first. An item that would not end within --seconds, or does
not fit into the memory, is dropped and named at the end.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product

import torch

from common.engine.device_copies import current_device
from common.engine.executor import TorchExecutor
from common.engine.kv_pool import TORCH_DTYPES
from common.errors import BatonError, ConfigError
from scripts.benchmarks.engines.engine import prefill_flops
from scripts.benchmarks.engines.gpu_parts import steps
from scripts.benchmarks.engines.gpu_parts.device import Device, Limits, measure_limits
from scripts.benchmarks.engines.gpu_parts.goals import goals
from scripts.benchmarks.engines.gpu_parts.kernels import AttentionCase, attention_s, operations
from scripts.benchmarks.engines.gpu_parts.time_budget import TimeBudget
from scripts.benchmarks.engines.overlap import measure_overlap
from scripts.benchmarks.harness.options import TRANSPORTS, comma_separated

SHORTEST = (
    "--device=cpu", "--dtype=float32", "--shapes=tiny", "--prompts=32,16", "--batches=2,1", "--contexts=16,32",
    "--num-steps=2", "--rounds=1", "--transports=shm", "--transfer-pages=4", "--parts=kernels,steps,overlap,transfers",
    "--seconds=100",
)  # fmt: skip
PARTS = ("kernels", "steps", "overlap", "transfers", "service")
#: Seconds of each part, as shares of --seconds. What one part leaves, the later ones may use.
SHARES = {"kernels": 0.15, "steps": 0.4, "overlap": 0.1, "transfers": 0.15, "service": 1.0}
CHUNK = 8192
#: Least seconds for starting a service, by shape; one that has less is dropped.
SERVICE_S = {"qwen3-0.6b": 60.0, "llama-3.1-8b": 150.0}
Options = argparse.Namespace  # the fields of `add_options`
Figures = dict[str, float]
Item = tuple[str, Callable[[], str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda", help="(%(default)s)")
    add("--dtype", default="bfloat16", choices=sorted(TORCH_DTYPES), help="(%(default)s)")
    add(
        "--shapes", type=comma_separated(str, among=steps.SHAPES), default="qwen3-0.6b,llama-3.1-8b",
        metavar="NAME,...", help="shapes of the models, with random weights (%(default)s)",
    )  # fmt: skip
    add("--parts", type=comma_separated(str, among=PARTS), default=",".join(PARTS), help="(%(default)s)")
    add(
        "--prompts", type=comma_separated(int), default="512,2048,8192,32768",
        metavar="TOKENS,...", help="lengths for prefill (%(default)s)",
    )  # fmt: skip
    add("--batches", type=comma_separated(int), default="1,16,64,256", help="decode rows (%(default)s)")
    add("--contexts", type=comma_separated(int), default="1024,8192,32768", help="tokens of each row (%(default)s)")
    add("--num-steps", type=int, default=16, help="decode steps of a measurement (%(default)s)")
    add("--rounds", type=int, default=3, help="the best one counts (%(default)s)")
    add("--transports", type=comma_separated(str, among=TRANSPORTS), default="cuda-ipc,shm,tcp", help="(%(default)s)")
    add("--transfer-pages", type=comma_separated(int), default="16,256,1024", help="(%(default)s)")
    add("--seconds", type=float, default=420.0, help="for the whole run (%(default)s)")


def run(options: Options) -> Figures:
    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--device {options.device}: torch finds no CUDA device; --shortest runs on the CPU")
    with current_device(torch.device(options.device)):  # of kernels, graphs and events
        return GpuBenchmark(options).run()


class GpuBenchmark:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._device = Device(options.device, options.dtype, rounds=options.rounds)
        self._budget = TimeBudget(options.seconds)
        self._figures: Figures = {}
        self._limits = Limits(1.0, 1.0)

    def run(self) -> Figures:
        torch.manual_seed(0)
        is_cuda = self._device.is_cuda
        self._limits = measure_limits(
            self._device, num_bytes=(1 << 30) if is_cuda else (1 << 24), matrix_size=8192 if is_cuda else 256
        )
        self._note("limits, memory GB/s", self._limits.bytes_per_s / 1e9)
        self._note("limits, products TFLOP/s", self._limits.flops_per_s / 1e12)
        print(f"{self._device.title}: {self._limits.bytes_per_s / 1e9:.1f} GB/s, ", end="")
        print(f"{self._limits.flops_per_s / 1e12:.2f} TFLOP/s", flush=True)
        print(f"{'':<52}{'measured':>12}{'limit':>12}{'of limit':>10}", flush=True)
        parts = {
            "kernels": self._kernels, "steps": self._steps, "overlap": self._overlap,
            "transfers": self._transfers, "service": self._service,
        }  # fmt: skip
        for name in self._options.parts:
            limit_s = SHARES[name] * self._options.seconds
            self._budget.part(parts[name](), limit_s)
            if self._device.is_cuda:
                torch.cuda.empty_cache()  # other processes need the memory next
        for goal in goals(dict(self._figures)) if is_cuda else ():
            self._note(f"{goal.name}, worst", goal.worst)
            print(goal.line, flush=True)
        if self._budget.dropped:
            print("not measured: " + "; ".join(self._budget.dropped), flush=True)
        return self._figures

    def _note(self, name: str, value: float) -> None:
        self._figures[name] = value

    def _report(self, name: str, seconds: float, least_s: float, *, rate: str = "") -> None:
        self._note(f"{name}, ms", seconds * 1e3)
        self._note(f"{name}, of limit", least_s / seconds)
        row = f"{name:<52}{seconds * 1e3:>9.3f} ms{least_s * 1e3:>9.3f} ms{least_s / seconds:>10.1%}"
        print(f"{row}  {rate}".rstrip(), flush=True)

    # ---- kernels ------------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Item]:
        options, shapes = self._options, self._options.shapes
        for num_tokens in (max(options.batches), max(options.prompts)):
            for shape in shapes:
                yield self._operations_item(shape, num_tokens)
        has_flash_attn = self._device.is_cuda and find_spec("flash_attn") is not None
        backends = ["auto", "sdpa", *(["flash-attn"] if has_flash_attn else [])]
        if not has_flash_attn:
            self._budget.drop("attention by flash-attn", "it needs CUDA and the package flash-attn-4")
        cases = [AttentionCase(1, prompt, prompt) for prompt in options.prompts]
        cases += [AttentionCase(batch, context, 1) for context in options.contexts for batch in options.batches]
        for case, shape, backend in product(cases, shapes, backends):
            yield self._attention_item(shape, case, backend)

    def _operations_item(self, shape: str, num_tokens: int) -> Item:
        def measure() -> str:
            for name, work, num_bytes in operations(steps.SHAPES[shape], num_tokens, self._device):
                least_s = self._limits.seconds(num_bytes=num_bytes)
                self._report(f"{shape}, {name}, {num_tokens} tokens", self._device.kernel_s(work), least_s)
            return ""

        return f"{shape}, operations on {num_tokens} tokens", measure

    def _attention_item(self, shape: str, case: AttentionCase, backend: str) -> Item:
        config = steps.SHAPES[shape]
        name = f"{shape}, {case.name}, {backend}"

        def measure() -> str:
            if 2 * case.kv_bytes(config, self._device.dtype_name) > self._device.free_bytes():
                return "not enough memory"
            try:
                seconds = attention_s(case, backend, config, self._device)
            except ConfigError as error:
                return str(error)
            self._report(name, seconds, case.least_s(config, self._device.dtype_name, self._limits))
            return ""

        return name, measure

    # ---- steps --------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Item]:
        for shape in self._options.shapes:
            yield f"{shape}, steps", lambda shape=shape: self._steps_of(shape)  # type: ignore[misc]

    def _steps_of(self, shape: str) -> str:
        options, config = self._options, steps.SHAPES[shape]
        num_tokens = steps.pool_tokens(options.batches, options.contexts, options.prompts, options.num_steps)
        executor = steps.random_executor(config, self._device, num_tokens=num_tokens, num_slots=max(options.batches))
        try:
            if self._device.is_cuda:
                steps.capture_graphs(executor, options.batches)
            items = [self._prefill_item(shape, executor, prompt) for prompt in options.prompts]
            items += [
                self._decode_item(shape, executor, batch, context)
                for context in options.contexts
                for batch in options.batches
            ]
            share = SHARES["steps"] * options.seconds / len(options.shapes)
            self._budget.part(items, share, growth=3.0)
        finally:
            executor.close()
        return ""

    def _prefill_item(self, shape: str, executor: TorchExecutor, num_tokens: int) -> Item:
        name = f"{shape}, prefill {num_tokens}"

        def measure() -> str:
            found = [steps.prefill_s(executor, num_tokens, CHUNK) for _ in range(1 + self._options.rounds)]
            if found[0] is None:
                return "not enough memory"
            seconds = min(one for one in found[1:] if one is not None)
            self._note(f"{name}, tokens/s", num_tokens / seconds)
            least_s = self._limits.seconds(flops=prefill_flops(executor.model.config, num_tokens))
            self._report(name, seconds, least_s, rate=f"{num_tokens / seconds:.0f} tokens/s")
            return ""

        return name, measure

    def _decode_item(self, shape: str, executor: TorchExecutor, batch: int, context: int) -> Item:
        name = f"{shape}, decode batch {batch} of {context}"

        def measure() -> str:
            rounds = range(self._options.rounds)
            found = [steps.decode_step_s(executor, batch, context, self._options.num_steps) for _ in rounds]
            if found[0] is None:
                return "not enough memory"
            seconds = min(one for one in found if one is not None)
            least_s = steps.decode_least_s(executor.model.config, self._device.dtype_name, batch, context, self._limits)
            self._note(f"{name}, tokens/s", batch / seconds)
            self._report(name, seconds, least_s, rate=f"{batch / seconds:.0f} tokens/s")
            return ""

        return name, measure

    # ---- overlap, transfers, service ----------------------------------------------------------------------------

    def _overlap(self) -> Iterator[Item]:
        for shape in self._options.shapes:
            yield f"{shape}, host time", lambda shape=shape: self._overlap_of(shape)  # type: ignore[misc]

    def _overlap_of(self, shape: str) -> str:
        """Host time between two steps, without and with overlap; on CUDA first without and then with graphs."""
        batches = self._options.batches[:3]
        context = self._options.contexts[0]
        num_steps = 4 * self._options.num_steps
        num_tokens = steps.pool_tokens(batches, [context], [], num_steps)
        config = steps.SHAPES[shape]
        executor = steps.random_executor(config, self._device, num_tokens=num_tokens, num_slots=max(batches))
        try:
            for has_graphs in (False, True) if self._device.is_cuda else (False,):
                if has_graphs:
                    steps.capture_graphs(executor, batches)
                what = "with graphs" if has_graphs else "without graphs"
                print(f"{shape}, {what}, context {context}", flush=True)
                for found in measure_overlap(executor, batches, context=context, num_steps=num_steps):
                    name = f"{shape}, {what}, batch {found.batch}"
                    whole = found.with_overlap.step_s + found.with_overlap.idle_s
                    self._note(f"{name}, us with overlap", whole * 1e6)
                    self._note(f"{name}, step us", found.without.step_s * 1e6)
                    self._note(f"{name}, host us without overlap", found.without.idle_s * 1e6)
                    if found.with_overlap.idle_s > 0:  # on a GPU the next step is queued by then
                        self._note(f"{name}, host us with overlap", found.with_overlap.idle_s * 1e6)
        finally:
            executor.close()
        return ""

    def _transfers(self) -> Iterator[Item]:
        from scripts.benchmarks.services import transfer  # a machine without its packages runs the other parts

        layouts = [shape for shape in self._options.shapes if shape in transfer.LAYOUTS] or ["qwen3-0.6b"]
        for layout in layouts:
            for transport in self._options.transports:
                yield self._transfer_item(layout, transport)

    def _transfer_item(self, layout: str, transport: str) -> Item:
        from scripts.benchmarks.services import transfer

        def measure() -> str:
            words = argparse.Namespace(device=self._options.device, cluster_key="")
            try:
                self._figures |= transfer.measure(words, layout, transport, sorted(self._options.transfer_pages))
            except ConfigError as error:
                return str(error)
            return ""

        return f"{layout}, transfers by {transport}", measure

    def _service(self) -> Iterator[Item]:
        for shape in self._options.shapes:
            yield f"{shape}, service", lambda shape=shape: self._service_of(shape)  # type: ignore[misc]

    def _service_of(self, shape: str) -> str:
        from scripts.benchmarks.engines.gpu_parts import service  # likewise

        if self._budget.left_s < SERVICE_S.get(shape, 0.0):
            return "no time left"
        try:
            for found in service.measure(shape, self._options.device, timeout_s=self._budget.left_s):
                name = f"{shape}, service, {found.concurrency} requests at once"
                self._note(f"{name}, tokens/s", found.tokens_per_s)
                print(f"{name:<52}{found.tokens_per_s:>10.0f} tokens/s, pages by {found.transports}", flush=True)
        except BatonError as error:
            return str(error)
        return ""
