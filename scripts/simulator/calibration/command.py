"""``simulate --calibrate URL``: measures a live service and writes a profile for ``--hardware``.

With a profile in ``--hardware``, it measures two decode nodes that share a processor, and adds what it finds to that.
"""

import datetime
import sys
from dataclasses import asdict, replace

import msgspec
import numpy as np

from common.errors import ConfigError
from scripts.load_tester.client.client_pool import ClientFailed
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.output_files import say
from scripts.load_tester.reporting.formats import milliseconds, percent
from scripts.simulator.calibration.drive import ServiceSize, ask_service, measure
from scripts.simulator.calibration.fit import Fit, TooFewSamples, fit_beside_decode, fit_costs
from scripts.simulator.calibration.samples import Samples
from scripts.simulator.config import POOL_TOKENS, SimulateConfig
from scripts.simulator.hardware.node_model import Profile, find_hardware
from scripts.simulator.report import write_report

#: Meanings of the costs that a calibration finds, in the order in which they are printed.
MEANINGS = {
    "step_s": "a decode step",
    "weights_s": "and for its requests, at least",
    "row_s": "and for each request in it",
    "context_token_s": "and for 1,000 tokens of its context",
    "prompt_step_s": "a step with prompts, beside that",
    "prompt_token_s": "and for 1,000 tokens of a prompt",
    "prompt_pair_s": "and for a million pairs of tokens",
    "message_s": "a message",
    "wire_s": "a transfer, beside its bytes",
}
#: Those that are others while both nodes compute, if they share a processor.
BESIDE = ("step_s", "weights_s", "row_s", "context_token_s", "prompt_step_s", "prompt_token_s", "prompt_pair_s")
#: Those of a decode step beside one of another decode node.
BESIDE_DECODE = ("step_s", "weights_s", "row_s", "context_token_s")
#: A median error above this means that the profile is not to be relied on.
DOUBTFUL = 0.1
SCALES = {"context_token_s": 1e3, "prompt_token_s": 1e3, "prompt_pair_s": 1e6}


def calibrate_command(config: SimulateConfig) -> int:
    """Measure, fit, write the profile to ``--json``; return the exit status."""
    assert config.calibrate is not None and config.json is not None

    def tell(words: str) -> None:
        if config.progress:
            print(words, file=sys.stderr, flush=True)

    base = LoadtestConfig(
        url=config.calibrate, api_key=config.api_key, model=config.model, scrape="none", live=False, clients=1,
        seed=config.seed, timeout=str(max(60.0, config.calibrate_seconds)),
    )  # fmt: skip
    known = None if config.hardware is None else find_hardware(config.hardware, config.model).source
    try:
        server, size = ask_service(base, num_decode=1 if known is None else 2)
    except ConfigError as error:
        raise ConfigError(_in_own_words(str(error))) from None
    if isinstance(known, Profile) and known.model != size.model:
        raise ConfigError(
            f"--hardware {config.hardware}: the profile is of {known.model}, and the service has {size.model}"
        )
    if server.kind in ("baton", "sglang"):  # whose own endpoint tells how long a prompt took on the node
        base = replace(base, endpoint="generate")
    kv_bytes = size.kv_bytes_per_token or config.kv_bytes_per_token
    try:
        samples = measure(base, server, size, seconds=config.calibrate_seconds, say=tell)
        if isinstance(known, Profile):
            profile = _with_beside_decode(known, samples)
        else:
            profile = _profile_of(config, size, fit_costs(samples, kv_bytes), kv_bytes)
    except TooFewSamples as error:
        raise ConfigError(f"--calibrate: {error}, too few to fit costs: raise --calibrate-seconds") from None
    except ClientFailed as error:
        raise ConfigError(f"--calibrate: {error}") from None
    text = msgspec.json.format(msgspec.json.encode(profile).decode(), indent=2) + "\n"
    is_written = write_report(config.json, "--json", lambda: text)
    say(*profile_lines(profile))
    if max(profile.errors.values()) > DOUBTFUL:
        print(
            f"simulate: an error of more than {DOUBTFUL:.0%} says that the service had other work, or that its steps "
            "are not of this form: calibrate again on an idle machine",
            file=sys.stderr,
        )
    return 0 if is_written else 1


def _in_own_words(message: str) -> str:
    """A message of the load tester, with the flag and the variable of this command."""
    return message.replace("--url ", "--calibrate ").replace(LoadtestConfig.ENV_PREFIX, SimulateConfig.ENV_PREFIX)


def _profile_of(config: SimulateConfig, size: ServiceSize, fit: Fit, kv_bytes: int) -> Profile:
    return Profile(
        model=size.model,
        costs={name: value for name, value in asdict(fit.costs).items() if name != "grammar_s"},
        kv_bytes_per_token=kv_bytes,
        pool_tokens=size.pool_tokens or config.max_total_tokens or POOL_TOKENS,
        num_devices=size.num_devices,
        price_per_hour=(config.price_per_hour or 0.0) * size.num_devices,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        errors=fit.errors,
        samples=fit.samples,
        beside={name: getattr(fit.beside, name) for name in BESIDE} if fit.beside else {},
        spread=dict(fit.spread),
    )


def _with_beside_decode(profile: Profile, samples: Samples) -> Profile:
    costs, error = fit_beside_decode(samples)
    name = "steps of two decode nodes"
    return msgspec.structs.replace(
        profile,
        beside_decode={cost: getattr(costs, cost) for cost in BESIDE_DECODE},
        errors=profile.errors | {name: error},
        samples=profile.samples | {name: len(samples.steps_beside_decode)},
    )


def profile_lines(profile: Profile) -> list[str]:
    """What was found, for people."""
    lines = [f"{'model':40}{profile.model}"]
    for name, meaning in MEANINGS.items():
        line = f"{meaning:40}{milliseconds(profile.costs[name] * SCALES.get(name, 1.0)):>8} ms"
        if name in profile.beside:
            line += f"{milliseconds(profile.beside[name] * SCALES.get(name, 1.0)):>8} ms while both nodes compute"
        if name in profile.beside_decode:
            line += f"{milliseconds(profile.beside_decode[name] * SCALES.get(name, 1.0)):>8} ms beside a decode node"
        lines.append(line)
    wire = profile.costs["wire_bytes_per_s"] / 1e9
    lines.append(f"{'bandwidth of transfers':40}{wire:>8.3g} GB/s")
    for role, factors in profile.spread.items():
        mean, most = np.mean(factors), factors[-1]
        lines.append(f"{f'{role} steps against these costs':40}{mean:>8.2f} times in the mean, {most:.2f} at most")
    for name, error in profile.errors.items():
        lines.append(f"{f'error of {profile.samples[name]:,} {name}, median':40}{percent(error):>8}")
    return lines
