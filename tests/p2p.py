"""What a rank sends to another: CommDebugMode does not see point-to-point traffic, so it is counted where it starts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def recorded(rank: int) -> Iterator[list[tuple[int, int, int]]]:
    """(this rank, receiver, bytes) of each send made inside, through ``P2POp`` or ``dist.send``. Ranks are global."""
    sends: list[tuple[int, int, int]] = []
    init, send = dist.P2POp.__init__, dist.send

    def counted_init(self, op, tensor, *args, **kwargs):
        init(self, op, tensor, *args, **kwargs)
        if op is dist.isend:
            sends.append((rank, self.peer, tensor.numel() * tensor.element_size()))

    def counted_send(tensor, dst=None, group=None, tag=0, group_dst=None):
        peer = dst if group_dst is None else dist.get_global_rank(group or dist.group.WORLD, group_dst)
        sends.append((rank, peer, tensor.numel() * tensor.element_size()))
        return send(tensor, dst=dst, group=group, tag=tag, group_dst=group_dst)

    dist.P2POp.__init__, dist.send = counted_init, counted_send
    try:
        yield sends
    finally:
        dist.P2POp.__init__, dist.send = init, send
