"""The table of hardware, from data sheets, and accelerators that users describe in a file.

Rates are peaks of dense bfloat16 without sparsity, as the makers publish them; efficiencies say which share of a peak
an engine reaches. Those of ``h200`` and ``cpu`` are measured with this project. Those of the other GPUs are
assumptions, typical of what serving engines report; calibrate a live service (``simulate --calibrate``) where figures
matter.

Prices are in US dollars per device and hour. They lie in the middle of what GPU clouds listed on demand in spring 2026
(A100 1.49 to 2.49, H100 2.49 to 3.99: https://pricegpu.pages.dev/blog/h100-vs-a100-cloud-price; H200 about 3.40:
https://e2enetworks.com/blog/nvidia-a100-vs-h100-vs-h200-gpu-comparison; those of L4 and cpu are rough). Prices differ
several times between providers: give your own (``--price-per-hour``).
"""

import msgspec


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accelerator", tag_field="kind"):
    """One device: a GPU, or the cores of a CPU that serve one node.

    Attributes:
        flops: multiplications and additions per second, in bfloat16.
        memory_bandwidth: bytes per second between the device and its memory.
        memory_bytes: size of that memory.
        link_bandwidth: bytes per second to other devices of the node, in each direction; 0: they cannot share a model.
        network_bandwidth: bytes per second of the device's share of the network, in each direction.
        price_per_hour: US dollars.
        matrix_efficiency: share of ``flops`` that large matrix products reach.
        attention_efficiency: share of ``flops`` that attention reaches in prompts.
        bandwidth_efficiency: share of ``memory_bandwidth`` that decode steps reach.
        step_overhead_s: time of a step beside its kernels: planning, launches, sampling.
        all_reduce_latency_s: time of one all-reduce of a few bytes.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float = 0.0
    network_bandwidth: float = 25e9
    price_per_hour: float = 0.0
    matrix_efficiency: float = 0.6
    attention_efficiency: float = 0.4
    bandwidth_efficiency: float = 0.75
    step_overhead_s: float = 0.001
    all_reduce_latency_s: float = 10e-6

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "memory_bytes", "network_bandwidth"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be more than 0")
        for name in ("matrix_efficiency", "attention_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be more than 0 and at most 1")
        for name in ("link_bandwidth", "price_per_hour", "step_overhead_s", "all_reduce_latency_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0")


ACCELERATORS = {
    found.name: found
    for found in (
        # https://www.nvidia.com/en-us/data-center/h200/: SXM, NVLink 900 GB/s both ways; 400 Gb/s of network each.
        # Efficiencies: of steps of Llama-3.1-8B and Qwen3-0.6B in bfloat16, measured in November 2026.
        Accelerator("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 3.5, 0.68, 0.37, 0.9, 0.0012),
        # https://www.nvidia.com/en-us/data-center/h100/: SXM.
        Accelerator("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 3.0),
        # https://www.nvidia.com/en-us/data-center/a100/: SXM, 80 GB, NVLink 600 GB/s both ways; 200 Gb/s of network.
        Accelerator("a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, 2.0),
        # https://www.nvidia.com/en-us/data-center/l4/: PCIe 4.0 with 16 lanes, no NVLink; 50 Gb/s of network.
        Accelerator("l4", 121e12, 300e9, 24e9, 32e9, 6.25e9, 0.7, all_reduce_latency_s=30e-6),
        # Two cores of AMD Zen 5 with AVX-512 BF16: 919 GFLOP/s in products of 512 rows and 36 of 40 GB/s in products
        # of one row, with weights packed by oneDNN; pages through shared memory. Measured in November 2026.
        Accelerator("cpu", 1.0e12, 40e9, 16e9, 0.0, 2e9, 0.1, 0.9, 0.3, 0.85, 0.002),
    )
}
