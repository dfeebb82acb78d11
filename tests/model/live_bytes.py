"""How much memory tensors take at most, on any device, counted from the operators that make them."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, ``peak`` is the most that storages made inside held at once. Memory inside an operator is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def keep(self, *tensors: torch.Tensor) -> "LiveBytes":
        """Do not count ``tensors``, which were there before."""
        self._seen.update(x.untyped_storage()._cdata for x in tensors)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, torch.Tensor) or (storage := x.untyped_storage())._cdata in self._seen:
                continue
            key, size = storage._cdata, storage.nbytes()
            self._seen.add(key)
            self.now += size
            weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
