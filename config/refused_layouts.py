"""Layouts that are refused, each with its reason, before a device or a process group is touched.

``REFUSED`` is the one list: config/layouts.py checks it, docs/parallelisms.md shows it, and tests hold the three
together.
"""

from config.refusal import Refusal
from config.refused_context_parallel import CONTEXT_PARALLEL
from config.refused_data_parallel import DATA_PARALLEL
from config.refused_expert_parallel import EXPERT_PARALLEL
from config.refused_memory import MEMORY
from config.refused_pipeline import PIPELINE
from config.refused_tensor_parallel import TENSOR_PARALLEL

REFUSED: tuple[Refusal, ...] = (
    *DATA_PARALLEL,
    *TENSOR_PARALLEL,
    *EXPERT_PARALLEL,
    *PIPELINE,
    *CONTEXT_PARALLEL,
    *MEMORY,
)
