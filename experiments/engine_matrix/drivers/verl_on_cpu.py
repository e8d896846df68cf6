"""The CPU with gloo as a platform of verl, by its plugin interface (`PlatformRegistry`): verl has none for CPUs.

Import it before verl's workers: it selects the platform, and outside a launcher sets the variables of one rank.
"""

import os
import types

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformCUDA):
    """The CPU with gloo: what verl asks of a platform while it trains."""

    device_name, vendor_name = "cpu", "cpu"
    device_module = types.SimpleNamespace(
        **vars(torch.cpu),
        **dict.fromkeys((f"{most}memory_{kind}" for most in ("", "max_") for kind in ("allocated", "reserved")), int),
        mem_get_info=lambda: (0, 0),
        get_device_name=lambda: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True."""
        return True

    def current_device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        """Return gloo's name."""
        return "gloo"


os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # the engine of CUDA, which names no device itself
for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))
