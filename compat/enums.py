"""The peers' enums."""

from __future__ import annotations

import enum

from lightning_utilities.core.enums import StrEnum as LightningEnum


class EnumWithContains(enum.EnumMeta):
    """Metaclass of enums that contain their values, so that ``"bf16" in PrecisionType`` is True."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """Enum whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Return the values of all members as strings."""
        return [str(member) for member in cls]


class FP8BackendType(str, enum.Enum):  # noqa: UP042 - printed with the class's name
    """Libraries for 8-bit training. Treadle uses torchao, the member ``AO``."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(str, enum.Enum):  # noqa: UP042 - as above
    """Environments in which Accelerate can run. Treadle does not start SageMaker jobs."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Names of ``torch.compile`` backends. The Accelerator rejects those that the installed torch does not have."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"

    __str__ = BaseEnum.__str__


class LoggerType(BaseEnum):
    """Names of trackers; see `Accelerator` for those that Treadle supports."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(str, BaseEnum):
    """Values of ``Accelerator(mixed_precision=...)``; ``fp8`` is torchao's float8."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"

    __str__ = BaseEnum.__str__


class RNGType(BaseEnum):
    """RNG states for `synchronize_rng_states`. Treadle supports ``torch``, ``cuda`` and ``generator``."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(enum.Enum):
    """Number formats that `dtype_byte_size` accepts in addition to torch's dtypes."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class GradClipAlgorithmType(LightningEnum):
    """Values of ``Trainer(gradient_clip_algorithm=...)``."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return whether an algorithm with exactly this name exists."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Return the names of the algorithms."""
        return [str(member.value) for member in GradClipAlgorithmType]
