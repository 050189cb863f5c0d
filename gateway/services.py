"""The parts of a gateway that its HTTP handlers use."""

from dataclasses import dataclass

from common.clock import Clock
from common.config import GatewayConfig
from gateway.asks import Asker
from gateway.claims import Claims
from gateway.control import Control
from gateway.dispatch import Dispatch
from gateway.metrics import Metrics
from gateway.models import Model
from gateway.quotas import Quotas


@dataclass(frozen=True, slots=True)
class Services:
    """Attributes:
    models: the served models; the first is the default.
    """

    config: GatewayConfig
    clock: Clock
    models: tuple[Model, ...]
    inputs: Asker
    priorities: Claims
    quotas: Quotas
    dispatcher: Dispatch
    control: Control
    metrics: Metrics
