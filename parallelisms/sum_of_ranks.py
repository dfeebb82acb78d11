"""A sum over ranks of what was sent, in float32, in one pass over memory."""

import torch


def sum_of_ranks(
    own: torch.Tensor, received: torch.Tensor, rank: int, target: torch.Tensor, *, add: bool = False
) -> None:
    """Write the sum to ``target``, or add it to what is there. Ranks are summed in their order: all orders of ranks
    that hold the same numbers give the same bits.

    Args:
        own: [n], this rank's part; contiguous, as a narrower or the same dtype as the target.
        received: [ranks - 1, n], those of the others in their order; rows contiguous.
        rank: whose part ``own`` is.
        target: [n], contiguous; float32 on a GPU.
    """
    if own.is_cuda and target.dtype == torch.float32:
        from parallelisms.sum_kernel import launch_sum

        with torch.cuda.device(own.device):
            launch_sum(own, received, rank, target, add=add)
        return
    parts = list(received)
    parts.insert(rank, own)
    total = parts[0].to(target.dtype)
    for part in parts[1:]:
        total = total + part
    target.copy_(target + total if add else total)
