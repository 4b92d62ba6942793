"""Accelerate's enums."""

from support.trainers import make_trainer
from treadle.compat.utilities.enums import GradClipAlgorithmType
from treadle.utils.dataclasses import (
    ComputeEnvironment,
    DynamoBackend,
    FP8BackendType,
    LoggerType,
    PrecisionType,
    RNGType,
)

import treadle


def test_enums():
    assert ("bf16" in PrecisionType, "int3" in PrecisionType) == (True, False)
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert (str(LoggerType.COMETML), str(DynamoBackend.INDUCTOR)) == ("comet_ml", "INDUCTOR")
    assert ComputeEnvironment.LOCAL_MACHINE == "LOCAL_MACHINE"
    assert (str(ComputeEnvironment.LOCAL_MACHINE), f"{FP8BackendType.AO}") == (
        "ComputeEnvironment.LOCAL_MACHINE",
        "FP8BackendType.AO",
    )
    accelerator = treadle.Accelerator(
        cpu=True, mixed_precision=PrecisionType.BF16, rng_types=[RNGType.GENERATOR], dynamo_backend=DynamoBackend.NO
    )
    assert accelerator.mixed_precision == "bf16"
    treadle.utils.synchronize_rng_states([RNGType.TORCH])


def test_kinds_of_clipping() -> None:
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert make_trainer(gradient_clip_algorithm=GradClipAlgorithmType.NORM).gradient_clip_algorithm == "norm"
