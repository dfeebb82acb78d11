"""Every kernel of Liger's against plain operators, on a CPU: run as a program, Triton interprets the kernels.

Prints a line "name<tab>error" for each tensor that is compared.
"""

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from liger_kernel.ops import cross_entropy, rms_norm
from torch import nn

from config.flavors import ModelShape
from model.attention import attention_backend
from model.decoder import Block
from model.feed_forward import gated
from model.liger import LigerRMSNorm, use_liger
from model.liger import gated as liger_gated
from model.liger import rotate as liger_rotate
from model.loss import IGNORE, HeadLoss
from model.loss_liger import LigerCrossEntropy, LigerFusedLinear
from model.rope import rope_frequencies, rope_table, rotate


def like_a_compiler(convert):
    """The interpreter hands a kernel floats as Python has them, a compiler as scalars of float32."""

    def converted(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    return converted


# What kernels take from CUDA's own library has no interpretation.
cross_entropy.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # tl.rsqrt is another one while a kernel runs
interpreter._implicit_cvt = like_a_compiler(interpreter._implicit_cvt)


def compare(name, ours, plain, *inputs):
    """Outputs and the gradients of random sums of them, of both functions."""
    found = []
    for function in (ours, plain):
        copies = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        outputs = function(*copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs).backward()
        found.append([*outputs, *(x.grad for x in copies if x.requires_grad)])
    for i, (x, y) in enumerate(zip(*found, strict=True)):
        print(f"{name}:{i}\t{float((x - y).norm() / y.norm()):.3e}")


def main() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    norm, plain = LigerRMSNorm(24, 1e-5), nn.RMSNorm(24, eps=1e-5)

    def of(module):
        return lambda x, w: torch.func.functional_call(module, {"weight": w}, x)

    compare("rms_norm", of(norm), of(plain), torch.randn(2, 5, 24), torch.randn(24))
    table = rope_table(9, rope_frequencies(12, 1e4, None))
    q, k = torch.randn(2, 9, 3, 12), torch.randn(2, 9, 1, 12)
    compare("rope", lambda q, k: liger_rotate(q, k, table), lambda q, k: rotate(q, k, table), q, k)
    rows = table[torch.randint(0, 9, (2, 9))]
    compare("rope of documents", lambda q, k: liger_rotate(q, k, rows), lambda q, k: rotate(q, k, rows), q, k)
    compare("swiglu", liger_gated, gated, torch.randn(2, 5, 20), torch.randn(2, 5, 20))
    labels = torch.randint(0, 37, (2, 7))
    labels[0, 2:5] = labels[1, 0] = IGNORE
    for cap in (0.0, 3.0):
        for z_loss in (0.0, 0.1):
            for kind in (LigerCrossEntropy, LigerFusedLinear):
                name = f"{kind.__name__} cap {cap} z {z_loss}"
                hidden, weight = torch.randn(2, 7, 16), torch.randn(37, 16)
                losses = [functools.partial(loss, labels=labels) for loss in (kind(cap, z_loss), HeadLoss(cap, z_loss))]
                compare(name, *losses, hidden, weight)
    ours, theirs = small_block(), small_block()
    use_liger(ours, rms_norm=True, rope=True, swiglu=True)
    ours.load_state_dict(theirs.state_dict())
    ours.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 9, 24)
    compare("compiled block", *(functools.partial(b, rope=table, mask=None) for b in (ours, theirs)), x)
    for (name, mine), plain in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        print(f"compiled block:{name}\t{float((mine.grad - plain.grad).norm() / plain.grad.norm()):.3e}")


def small_block() -> Block:
    shape = ModelShape(
        vocab_size=37,
        dim=24,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=12,
        hidden_dim=20,
        max_seq_len=9,
        qk_norm=True,
    )
    return Block(shape, attention_backend("sdpa"))


if __name__ == "__main__":
    main()
