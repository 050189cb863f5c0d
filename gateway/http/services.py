"""The parts of a gateway that its HTTP handlers use."""

from dataclasses import dataclass

from common.clock import Clock
from common.config.gateway import GatewayConfig
from gateway.metrics.collectors import Metrics
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.input_processor import InputProcessor
from gateway.requests.priority import PriorityResolver
from gateway.requests.quotas import Quotas
from gateway.workers.control_plane import ControlPlane
from gateway.workers.served_models import ServedModel


@dataclass(frozen=True, slots=True)
class Services:
    config: GatewayConfig
    clock: Clock
    models: tuple[ServedModel, ...]  # the first is the default
    inputs: InputProcessor
    priorities: PriorityResolver
    quotas: Quotas
    dispatcher: Dispatcher
    control: ControlPlane
    metrics: Metrics
