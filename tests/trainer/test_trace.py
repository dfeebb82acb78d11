"""What is read from a trace: kinds by name, phases by the moment of the launch, operators' own times."""

import pytest

from tests.trainer.events import GLOO, event, gloo, kernel, op, part
from trainer.trace import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    GEMM,
    OPTIMIZER,
    OTHER,
    OVERHEAD,
    kind_of,
    read_window,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION),
        ("gloo:all_gather", COMMUNICATION),
        ("c10d::_allgather_base_", COMMUNICATION),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", GEMM),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel<cutlass::gemm::GroupProblemShape>>", GEMM),
        ("void gemv2T_kernel_val<int, int, float, float>", GEMM),
        ("triton_tem_fused__to_copy_mm_t_5", GEMM),
        ("aten::mm", GEMM),
        ("aten::_grouped_mm", GEMM),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", ATTENTION),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION),
        ("triton_tem_fused_flex_attention_0", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("Memcpy HtoD (Pinned -> Device)", COPY),
        ("Memset (Device)", COPY),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>", COPY),
        ("void at::native::CatArrayBatchedCopy_alignedK_contig<OpaqueType<2u>, unsigned int, 1, 64, 64>", COPY),
        ("aten::_chunk_cat", COPY),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4, 1>>", OPTIMIZER),
        ("aten::_fused_adamw_", OPTIMIZER),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", ELEMENTWISE),
        ("kernel_cutlass_kernel_quackrmsnormRMSNorm_object", ELEMENTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", ELEMENTWISE),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>", ELEMENTWISE),
        ("_rms_norm_forward_kernel", ELEMENTWISE),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_what_is_elementwise_in_the_optimizer_is_the_optimizers():
    assert kind_of("void multi_tensor_apply_kernel<LpNormFunctor>", OPTIMIZER) == OPTIMIZER
    assert kind_of("ncclDevKernel_AllReduce_Sum_f32", OPTIMIZER) == COMMUNICATION


def test_a_kernel_belongs_to_the_part_that_launched_it():
    """Launches come from the backward thread too, and kernels run long after them."""
    window = read_window(
        [
            part("window", 0, 1000),
            part("forward micro-batch 0", 10, 100),
            part("backward micro-batch 0", 100, 300),
            part("optimizer", 300, 320),
            *kernel("nvjet_a", 50, 150, launched=20),
            *kernel("nvjet_b", 150, 500, launched=299),
            *kernel("adam", 500, 700, launched=310),
            *kernel("Memcpy HtoD", 700, 710, launched=330, cat="gpu_memcpy"),
            event("kernel", "graph", 710, 720, tid=7),  # without a launch
            event("gpu_user_annotation", "train/forward micro-batch 0", 50, 150, tid=7),
            op("aten::mm", 20, 30),
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        ]
    )
    assert window.device == "cuda" and window.span == (0, 1000)
    assert [(a.name, a.phase, a.own) for a in window.activities] == [
        ("nvjet_a", "forward", 100),
        ("nvjet_b", "backward", 350),
        ("adam", "optimizer", 200),
        ("Memcpy HtoD", OTHER, 10),
        ("graph", OTHER, 10),
    ]


def test_operators_have_their_own_times_and_gloo_is_read_from_its_threads():
    window = read_window(
        [
            part("window", 0, 100),
            part("forward", 0, 50),
            op("aten::linear", 10, 30),
            op("aten::t", 10, 12),
            op("aten::addmm", 13, 29),
            op("aten::relu", 30, 35),
            op("aten::copy_", 10, 90, tid=GLOO),
            op("autograd::engine::evaluate_function: MmBackward0", 60, 80),
            op("MmBackward0", 61, 79),
            op("aten::mm", 62, 70),
            gloo("all_reduce", 20, 90),
        ]
    )
    assert window.device == "cpu"
    found = {a.name: (a.kind, a.phase, a.own) for a in window.activities}
    assert found == {
        "aten::linear": (GEMM, "forward", 2),
        "aten::t": (ELEMENTWISE, "forward", 2),
        "aten::addmm": (GEMM, "forward", 16),
        "aten::relu": (ELEMENTWISE, "forward", 5),
        "autograd::engine::evaluate_function: MmBackward0": (OVERHEAD, OTHER, 2),
        "MmBackward0": (OVERHEAD, OTHER, 10),
        "aten::mm": (GEMM, OTHER, 8),
        "gloo:all_reduce": (COMMUNICATION, "forward", 70),
    }


def test_a_trace_without_a_window_is_said():
    with pytest.raises(ValueError, match="no range train/window"):
        read_window([op("aten::mm", 0, 1)])
