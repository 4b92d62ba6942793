"""Names that scripts import from ``accelerate.utils``, ``accelerate.state`` and ``accelerate.logging``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports
from ..common.peer_finder import add_peer_modules

if TYPE_CHECKING:
    from ..compat.available import (
        compare_versions,
        is_aim_available,
        is_bf16_available,
        is_bnb_available,
        is_clearml_available,
        is_comet_ml_available,
        is_cuda_available,
        is_datasets_available,
        is_deepspeed_available,
        is_dvclive_available,
        is_fp8_available,
        is_fp16_available,
        is_hpu_available,
        is_matplotlib_available,
        is_megatron_lm_available,
        is_mlflow_available,
        is_mlu_available,
        is_mps_available,
        is_musa_available,
        is_neuron_available,
        is_npu_available,
        is_pandas_available,
        is_peft_available,
        is_rich_available,
        is_schedulefree_available,
        is_sdaa_available,
        is_swanlab_available,
        is_tensorboard_available,
        is_timm_available,
        is_torch_version,
        is_torch_xla_available,
        is_torchdata_available,
        is_torchvision_available,
        is_tpu_available,
        is_trackio_available,
        is_transformer_engine_available,
        is_transformers_available,
        is_triton_available,
        is_wandb_available,
        is_xpu_available,
    )
    from ..compat.environment import (
        clear_device_cache,
        patch_environment,
        release_memory,
        tqdm,
        write_basic_config,
    )
    from ..compat.operations import (
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        set_seed,
        synchronize_rng_state,
        synchronize_rng_states,
        wait_for_everyone,
    )
    from ..compat.rank_logging import get_logger
    from ..engine import (
        AcceleratorState,
        AORecipeKwargs,
        AutocastKwargs,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        FP8RecipeKwargs,
        GeneralTracker,
        GradientAccumulationPlugin,
        GradientState,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        KwargsHandler,
        MegatronLMPlugin,
        MSAMPRecipeKwargs,
        PartialState,
        ProfileKwargs,
        ProjectConfiguration,
        TERecipeKwargs,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
        seed_everything,
    )
    from ..engine.data import skip_first_batches
    from ..engine.nested import (
        concatenate,
        convert_outputs_to_fp32,
        convert_to_fp32,
        extract_model_from_parallel,
        find_batch_size,
        find_device,
        honor_type,
        is_compiled_module,
        is_namedtuple,
        is_torch_tensor,
        listify,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )
    from ..engine.optim import find_executable_batch_size
    from ..strategies import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )
    from ..strategies.distributed import DistributedOperationException, DistributedType

__path__ = add_peer_modules(__name__, __path__)
__getattr__, __dir__, __all__ = lazy_exports(__name__)

# The module of this name first, so that no later import of it replaces the function.
importlib.import_module(f"{__name__}.tqdm")
__getattr__("tqdm")
