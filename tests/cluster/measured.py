"""A measured performance model, for tests of what keeps and reads one."""

from __future__ import annotations

from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import DecodeFit, PrefillFit, Quality
from cluster.performance_model import DecodeModel, ModelKey, PrefillModel, Transfer

KEY = ModelKey("a processor, 2 threads", "fingerprint", "bfloat16", "cpu", "0.1.0")
QUALITY = Quality(0.99, 0.02, 2, 0, ((0.1, 0.11), (0.2, 0.19)))
PROFILE = PerformanceProfile(
    KEY,
    DecodeFit(DecodeModel(0.03, 1e-4, 1e-8, 1e-6, "adapter_ranks"), QUALITY, {"adapter_ranks": 0.02}),
    PrefillFit(PrefillModel(0.01, 5e-4, 0.0, 1e-7), QUALITY),
    Transfer(1e-4, 1e9),
    Transfer(1e-2, 2e8),
    0.6,
    thorough=True,
)
