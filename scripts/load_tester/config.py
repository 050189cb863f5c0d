"""Options of the load tester, and the combinations that are refused."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from common.config.options import check_unset, flag_of, option
from common.errors import ConfigError
from scripts.load_tester.workload.lengths import MAX_LENGTH, MAX_TURNS, parse_lengths
from scripts.load_tester.workload.planned_request import MAX_GROUPS
from scripts.load_tester.workload.schedule import MAX_RATE, MAX_REQUESTS, MAX_SECONDS, MIN_RATE, Arrival, RateProfile

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
MAX_SEED = 2**63 - 1
SECONDS = "Seconds, or with a unit: 200ms, 30s, 5m."


def parse_seconds(text: str | None, flag: str) -> float | None:
    """Parse ``0.2``, ``200ms``, ``30s``, ``5m`` or ``1h`` to seconds; None for None.

    Raises ConfigError: names the flag.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(us|ms|s|m|h|)", text.strip())
    if not found:
        raise ConfigError(f"{flag} must be seconds, or a number with a unit (200ms, 30s, 5m), not {text!r}")
    value = float(found.group(1)) * UNITS[found.group(2)]
    if value > MAX_SECONDS:
        raise ConfigError(f"{flag} must be at most {MAX_SECONDS:g} seconds, not {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Arrivals, requests and service levels: all that a plan depends on. The simulator takes the same options."""

    # Arrivals
    rate: str | None = option(
        None,
        "Requests per second (a session counts once): 4, a ramp over --duration 1..10, or steps 1x30,2x30 "
        "(rate x seconds). With --trace: the trace's pace is scaled to this mean rate.  [default: 1]",
    )
    arrival: Arrival = option("poisson", "Distribution of arrivals at that rate.")
    cv: float = option(2.0, "Gamma arrivals: standard deviation over mean of the gaps.", minimum=0.01, maximum=100)
    burst_size: int = option(8, "Burst arrivals: requests at one instant.", minimum=1)
    concurrency: int | None = option(
        None, "Closed loop instead of --rate: this many requests, or sessions, at a time.", minimum=1, maximum=100_000
    )
    num_requests: int | None = option(
        None,
        "Total arrivals (a session counts once).  [default: 60, without --duration]",
        minimum=1,
        maximum=MAX_REQUESTS,
    )
    duration: str | None = option(None, f"No arrivals after this. {SECONDS}")
    warmup: str = option("0", f"Requests intended before this are not measured. {SECONDS}")
    cooldown: str = option("0", f"Requests intended in the last part of the schedule are not measured. {SECONDS}")
    seed: int = option(
        0, "Seed of all random draws: same seed, same requests at the same instants.", minimum=0, maximum=MAX_SEED
    )

    # Requests
    input_len: str = option(
        "128", "Prompt tokens: N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or file:PATH; then :max=N."
    )
    output_len: str = option("32", "Output tokens, in the same forms.")
    prefix_len: int = option(
        0, "Tokens before --input-len that all requests of a group share.", minimum=0, maximum=MAX_LENGTH
    )
    prefix_groups: int = option(1, "Number of groups, drawn evenly.", minimum=1, maximum=MAX_GROUPS)
    turns: str = option("1", "Requests of a session, one after another, each with all earlier turns in its prompt.")
    think: str = option("0", f"Mean pause between a response and the next turn, exponential. {SECONDS}")
    tenants: int = option(0, "Number of tenants, drawn evenly; 0 for none.", minimum=0, maximum=1_000_000)
    mix: str | None = option(
        None,
        "Classes of requests, NAME:KEY=VALUE,KEY=VALUE;NAME:... such as 'chat:share=3,input=200;batch:output=500'. "
        "Keys: share (a weight), input, output, prefix, groups, turns, think, tenant, priority, class, deadline, "
        "slo-ttft, slo-itl, slo-tpot, slo-e2e. Without one, the option of that name applies.",
    )
    trace: str | None = option(
        None, "Replay a trace: Mooncake, Azure, BurstGPT or Qwen-Bailian; or your own requests as JSON lines."
    )
    trace_unit: Literal["auto", "s", "ms", "us"] = option("auto", "Unit of the trace's timestamps.")
    trace_window: str | None = option(
        None,
        "Replay only this part, in seconds of the trace; without timestamps, in numbers of its requests, from 0.",
        metavar="FROM:TO",
    )
    trace_jitter: bool = option(False, "Spread requests of one tick of the trace's clock evenly over the tick.")
    time_scale: float = option(
        1.0, "Seconds of replay per second of the trace: 0.1 replays it ten times as fast.", minimum=1e-9
    )
    length_scale: float = option(1.0, "Factor for prompts, outputs and shared prefixes of a trace.", minimum=1e-6)
    output_scale: float | None = option(None, "Factor for outputs of a trace, instead of --length-scale.", minimum=1e-6)
    max_input_len: int | None = option(
        None, "Longer prompts of a trace are cut to this.", minimum=1, maximum=MAX_LENGTH
    )
    max_output_len: int | None = option(
        None, "Longer outputs of a trace are cut to this.", minimum=1, maximum=MAX_LENGTH
    )

    # Service levels
    slo_ttft: str | None = option(None, f"Limit on the time to first token. {SECONDS}")
    slo_itl: str | None = option(None, f"Limit on 99 % of a request's gaps between tokens. {SECONDS}")
    slo_tpot: str | None = option(None, f"Limit on the mean time per token after the first. {SECONDS}")
    slo_e2e: str | None = option(None, f"Limit on the time to the last token. {SECONDS}")
    slo_attainment: float = option(0.9, "Share of requests that must be within all limits.", minimum=0.0, maximum=1.0)

    # ---- parsed values -----------------------------------------------------------------------------------------------

    @property
    def duration_s(self) -> float | None:
        return parse_seconds(self.duration, "--duration")

    @property
    def warmup_s(self) -> float:
        return parse_seconds(self.warmup, "--warmup") or 0.0

    @property
    def cooldown_s(self) -> float:
        return parse_seconds(self.cooldown, "--cooldown") or 0.0

    @property
    def slos(self) -> dict[str, float]:
        """The given limits in seconds, by ttft, itl, tpot, e2e."""
        names = ("ttft", "itl", "tpot", "e2e")
        limits = {name: parse_seconds(getattr(self, f"slo_{name}"), f"--slo-{name}") for name in names}
        for name, limit in limits.items():
            if limit == 0:
                raise ConfigError(f"--slo-{name} must be more than 0")
        return {name: limit for name, limit in limits.items() if limit is not None}

    @property
    def profile(self) -> RateProfile:
        return RateProfile.parse(self.rate or "1", self.duration_s)

    @property
    def window(self) -> tuple[float, float]:
        """First and last second of the trace to replay; without timestamps, numbers of its requests."""
        try:
            begin, _, end = (self.trace_window or "0:").partition(":")
            found = (float(begin or 0), float(end) if end else float("inf"))
        except ValueError:
            found = (1.0, 0.0)
        if not 0 <= found[0] < found[1]:
            raise ConfigError(f"--trace-window must be FROM:TO, such as 60:120, not {self.trace_window!r}")
        return found


@dataclass(frozen=True, kw_only=True)
class _Target:
    # Server
    url: str = option("http://127.0.0.1:8000", "Server to load; a path before /v1 is kept.", metavar="URL")
    api_key: str | None = option(None, "Sent as a bearer token; better set in the environment.", is_secret=True)
    model: str | None = option(None, "Name of the model; by default the first that the server lists.")
    endpoint: Literal["completions", "chat", "generate"] = option(
        "completions", "completions and chat are OpenAI's; generate is SGLang's, with the server's own timings."
    )
    stream: bool = option(True, "Stream responses; otherwise all tokens of a response count at its end.")
    timeout: str = option("600", f"A request that takes longer is aborted and counts as failed. {SECONDS}")
    header: str | None = option(
        None, "One more header for every request; replaces Host, Accept and the like.", metavar="'NAME: VALUE'"
    )
    tenant_header: str | None = option(
        None,
        "Header that names a request's tenant (Baton's: x-baton-tenant), instead of the body's `user`.",
        metavar="NAME",
    )
    tenant_keys: str | None = option(
        None,
        "File of tenants' API keys, sent as bearer tokens: on each line a name (of --tenants: tenant-0, tenant-1 and so"
        " on) and a key.",
        metavar="FILE",
    )
    extra_body: str | None = option(None, "More fields for every body.", metavar="JSON")
    verify_tls: bool = option(True, "Check the server's certificate.")


@dataclass(frozen=True, kw_only=True)
class LoadtestConfig(LoadOptions, _Target):
    """Configuration of ``loadtest``; the defaults send 60 requests at 1 per second."""

    ENV_PREFIX: ClassVar[str] = "BATON_LOADTEST_"

    # Requests
    prompt: Literal["ids", "text"] = option("ids", "Send token ids (exact lengths) or words; chat always sends words.")
    tokenizer: str | None = option(
        None, "tokenizer.json, or a folder with one, to trim words to the exact number of tokens."
    )
    vocab_size: int | None = option(None, "Draw token ids below this; by default the server is asked.", minimum=16)
    ignore_eos: bool = option(True, "Ask the server to generate the full length (not in OpenAI's own API).")
    return_token_ids: bool = option(False, "Ask for token ids in responses (Baton, vLLM), to count tokens exactly.")

    # Rates and checks
    find_goodput: bool = option(False, "Search for the highest rate that reaches --slo-attainment.")
    search_steps: int = option(5, "--find-goodput: bisections after the limit is enclosed.", minimum=0)
    sweep: str | None = option(None, "One run at each of these rates.", metavar="RATE,RATE,...")
    flush_cache: bool = option(False, "Empty the prefix cache first (Baton, SGLang; vLLM in development mode).")
    expect_file: str | None = option(
        None, "Compare outputs, token for token, with those in this --jsonl of another run.", metavar="FILE"
    )

    # Outputs
    json: str | None = option(
        None, "Write the report; - for standard output, with all other lines on standard error.", metavar="FILE"
    )
    jsonl: str | None = option(None, "Write one line per request.", metavar="FILE")
    html: str | None = option(None, "Write the report as one self-contained page.", metavar="FILE")
    svg: str | None = option(None, "Write each chart as an SVG file into this folder.", metavar="FOLDER")
    live: bool = option(True, "Show live progress if standard error is a terminal.")
    scrape: str = option("auto", "Server metrics to record: a URL, auto (/metrics) or none.")
    scrape_interval: float = option(1.0, "Seconds between two scrapes.", minimum=0.05)

    # Client
    clients: int | None = option(None, "Client processes; by default as many as the load needs.", minimum=1, maximum=64)
    max_send_lateness: str = option("25ms", f"A run is invalid if 1 % of requests go out later than this. {SECONDS}")

    def __post_init__(self) -> None:
        check_load(self)
        _check_times(self)
        check_url(self.url, "--url")
        if found := re.search(r"/(v1/(chat/)?completions|generate)/?$", self.url):
            raise ConfigError(f"--url {self.url}: leave {found[0]} out and use --endpoint")
        if self.scrape not in ("auto", "none"):
            check_url(self.scrape, "--scrape (auto, none or a URL)", has_query=True)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key has characters that a header cannot have, perhaps a line end")
        if self.clients and self.concurrency and self.clients > self.concurrency:
            raise ConfigError(f"--clients {self.clients} is more than --concurrency {self.concurrency}: lower it")
        _check_header(self)
        if self.tenant_header is not None and not re.fullmatch(r"[A-Za-z0-9-]+", self.tenant_header):
            raise ConfigError(f"--tenant-header must be a header's name, not {self.tenant_header!r}")
        _check_rates(self)
        timed = {*self.slos, *re.findall(r"slo-(\w+) *=", self.mix or "")} & {"ttft", "itl", "tpot"}
        if not self.stream and timed:
            flags = ", ".join(f"--slo-{name}" for name in sorted(timed))
            raise ConfigError(f"{flags} need --stream: without it all tokens come at the end; use --slo-e2e")
        if self.tokenizer and self.endpoint != "chat" and self.prompt != "text":
            raise ConfigError("--tokenizer needs --prompt text")
        _ = self.body_fields

    # ---- parsed values ----------------------------------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        return parse_seconds(self.timeout, "--timeout") or 0.0

    @property
    def lateness_s(self) -> float:
        return parse_seconds(self.max_send_lateness, "--max-send-lateness") or 0.0

    @property
    def sends_ids(self) -> bool:
        """Whether prompts are token ids instead of words."""
        return self.prompt == "ids" and self.endpoint != "chat"

    @property
    def body_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError("--extra-body must be a JSON object")
        return fields


def _check_rates(config: "LoadtestConfig") -> None:
    """Raises ConfigError: an option does not go with --sweep or --find-goodput, which make several runs."""
    if config.find_goodput and not config.slos:
        raise ConfigError("--find-goodput needs at least one of --slo-ttft, --slo-itl, --slo-tpot, --slo-e2e")
    if config.find_goodput and (config.concurrency or config.sweep):
        raise ConfigError("--find-goodput chooses the rate itself: leave --concurrency and --sweep out")
    if config.concurrency and config.sweep:
        raise ConfigError("--sweep sets rates: leave --concurrency out")
    if config.find_goodput and config.rate and not re.fullmatch(r"\d+\.?\d*|\.\d+", config.rate):
        raise ConfigError(
            f"--rate with --find-goodput must be one number, where the search begins, not {config.rate!r}"
        )
    if config.sweep and config.rate:
        raise ConfigError("--sweep sets rates: leave --rate out")
    if (config.sweep or config.find_goodput) and config.time_scale != 1:
        raise ConfigError("--sweep and --find-goodput set the rate of a trace: leave --time-scale out")
    if config.sweep and not all(map(_is_rate, config.sweep.split(","))):
        limits = f"{MIN_RATE:g} to {MAX_RATE:g} per second"
        raise ConfigError(f"--sweep must be rates ({limits}), such as 1,2,4, not {config.sweep!r}")
    for name in ("jsonl", "expect_file") if config.sweep or config.find_goodput else ():
        if getattr(config, name):
            raise ConfigError(f"{flag_of(name)} is for a single run: leave --sweep and --find-goodput out")


def _is_rate(word: str) -> bool:
    return bool(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", word)) and MIN_RATE <= float(word) <= MAX_RATE


def check_url(url: str, flag: str, *, has_query: bool = False) -> None:
    """Raise ConfigError, naming the flag, if the URL is invalid or has parts that would not be used."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no number, or out of range; a name with an empty or a very long part
        is_one = False
    if not is_one:
        raise ConfigError(f"{flag} must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    if parts.username is not None:
        raise ConfigError(f"{flag}: its name and password would not be sent: use --api-key or --header")
    if not re.fullmatch("[!-~]+", url):
        raise ConfigError(f"{flag} must be ASCII without spaces (xn--... for a host, %20 in a path), not {url!r}")
    if parts.fragment or (parts.query and not has_query):
        raise ConfigError(f"{flag}: the part after the path of {url!r} would not be sent: leave it out")


def has_limits(mix: str | None) -> bool:
    """Whether a class of ``--mix`` has limits or deadlines of its own."""
    return any(word in (mix or "") for word in ("slo-", "deadline="))


#: Options without effect unless another is given: field, the other flag, and whether it is given.
NEEDS: tuple[tuple[str, str, Callable[["LoadtestConfig"], Any]], ...] = (
    ("search_steps", "--find-goodput", lambda config: config.find_goodput),
    # Lines of a trace, which is not read yet, may have limits of their own.
    (
        "slo_attainment",
        "a limit, such as --slo-ttft",
        lambda config: config.slos or has_limits(config.mix) or config.trace,
    ),
    ("scrape_interval", "--scrape", lambda config: config.scrape != "none"),
    ("vocab_size", "--prompt ids, and no --endpoint chat", lambda config: config.sends_ids),
)
LOAD_NEEDS: tuple[tuple[str, str, Callable[["LoadOptions"], Any]], ...] = (
    ("cv", "--arrival gamma", lambda config: config.arrival == "gamma"),
    ("burst_size", "--arrival burst", lambda config: config.arrival == "burst"),
    *(
        (name, "an open loop: leave --concurrency out", lambda config: not config.concurrency)
        for name in ("arrival", "time_scale", "trace_jitter")
    ),
    ("prefix_groups", "--prefix-len", lambda config: config.prefix_len or "prefix=" in (config.mix or "")),
    ("think", "--turns", lambda config: config.turns != "1" or "turns=" in (config.mix or "")),
    ("trace_unit", "--trace", lambda config: config.trace),
)


def check_needs(config: Any, needs: Sequence[tuple[str, str, Callable[[Any], Any]]]) -> None:
    """Raise ConfigError for a changed option without effect."""
    for name, other, is_there in needs:
        if not is_there(config):
            check_unset(config, (name,), f"needs {other}: it has no effect otherwise")


def _check_header(config: LoadtestConfig) -> None:
    """Raise ConfigError, without the value, for a ``--header`` that would break a request's head."""
    if config.header is None:
        return
    found = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~]*)", config.header)
    if not found:
        raise ConfigError("--header must be 'NAME: VALUE', in ASCII and on one line")
    if found[1].lower() in ("content-length", "transfer-encoding"):
        raise ConfigError(f"--header {found[1]}: the load tester sets it itself; leave it out")
    if found[1].lower() == "authorization" and (config.api_key or config.tenant_keys):
        raise ConfigError("--header Authorization conflicts with --api-key and --tenant-keys: choose one")


def _check_times(config: LoadtestConfig) -> None:
    for name in ("timeout", "max_send_lateness"):
        found = parse_seconds(getattr(config, name), flag_of(name))
        if found == 0 and name == "timeout":
            raise ConfigError("--timeout must be more than 0")


def check_load(config: LoadOptions) -> None:
    """Raise ConfigError for invalid times and lengths, and options that conflict."""
    for name in ("duration", "warmup", "cooldown", "think"):
        found = parse_seconds(getattr(config, name), flag_of(name))
        if found == 0 and name == "duration":
            raise ConfigError("--duration must be more than 0")
    _ = config.slos, config.window, config.profile
    if config.duration_s is not None and config.warmup_s + config.cooldown_s >= config.duration_s:
        raise ConfigError("--warmup and --cooldown take all of --duration: shorten them, or nothing is measured")
    check_needs(config, LOAD_NEEDS)
    for name, most in (("input_len", MAX_LENGTH), ("output_len", MAX_LENGTH), ("turns", MAX_TURNS)):
        parse_lengths(getattr(config, name), flag_of(name), most)
    _check_together(config)


def _check_together(config: LoadOptions) -> None:
    if config.concurrency and config.rate:
        raise ConfigError(
            "--concurrency makes a closed loop and --rate an open one: choose one. "
            "(A limit on an open loop would hide the server's delays.)"
        )
    if config.trace is None:
        check_unset(config, ("trace_window", "output_scale", "max_input_len", "max_output_len"), "needs --trace")
        if config.trace_jitter or config.time_scale != 1 or config.length_scale != 1:
            raise ConfigError("--trace-jitter, --time-scale and --length-scale need --trace")
    elif config.mix or config.turns != "1" or config.prefix_len:
        raise ConfigError("--trace has its own lengths and sessions: leave --mix, --turns and --prefix-len out")
    elif (config.input_len, config.output_len) != ("128", "32"):
        raise ConfigError("--trace has its own lengths: use --length-scale, --max-input-len and --max-output-len")
    elif config.rate and config.time_scale != 1:
        raise ConfigError("--rate and --time-scale both set the rate of the trace: choose one")
    elif config.rate and len(config.profile.phases) > 1:
        raise ConfigError("with --trace, --rate must be one number, the mean rate")
