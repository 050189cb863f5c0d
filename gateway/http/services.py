"""The parts of a gateway that its HTTP handlers use."""

from dataclasses import dataclass

from common.clock import Clock
from common.config.gateway import GatewayConfig
from gateway.metrics.collectors import Metrics
from gateway.metrics.live import LiveHistory
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.admission.quotas import Quotas
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.idempotency import IdempotencyStore
from gateway.requests.input.input_processor import InputProcessor
from gateway.requests.response_store import ResponseStore
from gateway.siblings.forwarding import Siblings
from gateway.text.tokenizer import AsyncTokenizer
from gateway.tracing.timelines import Timelines
from gateway.tracing.tracer import Tracer
from gateway.workers.control_plane import ControlPlane
from gateway.workers.served_models import ServedModels


@dataclass(frozen=True, slots=True)
class Services:
    config: GatewayConfig
    clock: Clock
    models: ServedModels
    tokenizer: AsyncTokenizer
    inputs: InputProcessor
    responses: ResponseStore
    idempotency: IdempotencyStore
    priorities: PriorityResolver
    quotas: Quotas
    dispatcher: Dispatcher
    control: ControlPlane
    metrics: Metrics
    live: LiveHistory
    timelines: Timelines
    tracer: Tracer
    siblings: Siblings | None = None  # the other gateways behind the same port
