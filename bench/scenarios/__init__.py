"""What is measured, by name. A scenario starts what it needs, adds rows, then claims."""

from collections.abc import Callable, Mapping

from bench.measuring import Bench
from bench.scenarios import devices, fronts, queues

SCENARIOS: Mapping[str, Callable[[Bench], None]] = {
    "sweep": fronts.sweep,
    "lone_client": fronts.lone_client,
    "convnet_limit": fronts.convnet_limit,
    "http_peers": fronts.http_peers,
    "direct_producers": queues.direct_producers,
    "priorities": queues.priorities,
    "device_busy": devices.device_busy,
    "workers_scaling": devices.workers_scaling,
    "ray_trap": devices.ray_trap,
}
