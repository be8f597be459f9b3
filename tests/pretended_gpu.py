"""A GPU that is not there: tensors say that they are on it, and torch's CPU kernels compute their numbers.

Each operation first runs on tensors without numbers, under `FakeTensorMode`: torch's own account of the shapes, dtypes
and devices that GPU kernels take and give, which raises where devices mix. Then it runs on the CPU, and results
must be as told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

GPU = torch.device("cuda:0")
MEMORY = 2**34  # bytes, of which none are ever taken
# What functions of `torch.cuda` return.
ANSWERS = {
    "_lazy_init": None,
    "is_available": True,
    "synchronize": None,
    "get_device_name": "pretended",
    "mem_get_info": (MEMORY, MEMORY),
    "memory_reserved": 0,
    "memory_allocated": 0,
}
DATA_DEPENDENT = DataDependentOutputException, DynamicOutputShapeException
RESULT_TYPES = dict[Any, Any]()  # of operations by their arguments, in this process


class OnGPU(Tensor):
    """Tensor on the pretended GPU. C++ takes its device for "meta", Python for `GPU`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGPU:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made: OnGPU = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device="meta", **layout)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    # C++ would make tensors of lists for "meta".
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_sent(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_sent(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGPU({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran in a thread that knows nothing of the pretended GPU")


def _sent(index: Any) -> Any:
    """An index with its lists as tensors on the pretended GPU, where a GPU would copy them, too."""
    if isinstance(index, tuple):
        return tuple(_sent(each) for each in index)
    return torch.tensor(index).to(GPU) if isinstance(index, list) else index


class Meta(threading.local):
    """Whether a function of torch runs because of `with torch.device("meta")`, in this thread."""

    inside = False


META = Meta()


class PretendedGPU(TorchDispatchMode):
    """Lets operations of this thread run on the pretended GPU.

    Attributes:
        waits: Operations for which the host would wait until a GPU has done its work: those that real CUDA reports with
            `torch.cuda.set_sync_debug_mode`.
    """

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits
        self._fakes = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func)
        if name.startswith("aten.is_pinned"):
            return False
        if name.startswith("aten._pin_memory"):
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        here = wanted is None or wanted == "cpu" or (wanted == "meta" and META.inside)
        if here and not any(isinstance(each, OnGPU) for each in given):
            return func(*args, **kwargs)
        if wanted == "meta":  # C++ makes a tensor for where it takes an OnGPU to be
            kwargs["device"], wanted = GPU, "cuda"
        results = self._result_types(func, args, kwargs)
        if results is None:
            self.waits.append(name)
        inner_args, inner_kwargs = tree_map_only(OnGPU, lambda each: each.inner, (args, kwargs))
        if wanted:
            inner_kwargs["device"] = torch.device("cpu")
        flat, layout = tree_flatten(func(*inner_args, **inner_kwargs))
        self._note_copies(name, given, wanted, kwargs)
        known = {id(each.inner if isinstance(each, OnGPU) else each): each for each in given}
        found = [known.get(id(x), x if wanted == "cpu" or not isinstance(x, Tensor) else OnGPU(x)) for x in flat]
        for mine, expected in zip(found, results or (), strict=results is not None):
            if isinstance(mine, Tensor):
                assert (mine.shape, mine.dtype, mine.device.type) == expected, (name, mine.shape, mine.device, expected)
        return tree_unflatten(found, layout)

    def _result_types(self, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
        """Return shape, dtype and device type of each result on a GPU, or None if they depend on numbers.

        They are computed once for each operation and kind of arguments.
        """

        def fake(each: Tensor) -> Tensor:
            return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)

        leaves, layout = tree_flatten((args, kwargs))
        kinds = [(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
        key = func, layout, *kinds
        if key not in RESULT_TYPES:
            with self._fakes:
                fake_args, fake_kwargs = tree_map_only(Tensor, fake, (args, kwargs))
                try:
                    results = tree_leaves(func(*fake_args, **fake_kwargs))
                except DATA_DEPENDENT:
                    RESULT_TYPES[key] = None
                else:
                    RESULT_TYPES[key] = [
                        (x.shape, x.dtype, x.device.type) if isinstance(x, Tensor) else None for x in results
                    ]
        return RESULT_TYPES[key]

    def _note_copies(self, name: str, given: list[Tensor], wanted: str | None, kwargs: Any) -> None:
        """Note a copy between host and GPU that is waited for."""
        if name.startswith("aten._to_copy") and wanted:
            crosses = isinstance(given[0], OnGPU) == (wanted == "cpu")
        else:
            crosses = name.startswith("aten.copy_") and isinstance(given[0], OnGPU) != isinstance(given[1], OnGPU)
        blocking = not kwargs.get("non_blocking") or not any(hasattr(each, "pinned") for each in given)
        if crosses and blocking:
            self.waits.append(name)


@contextmanager
def pretended_gpu() -> Iterator[list[str]]:
    """Pretend for this thread and those that it starts that there is a GPU. Yields the list of `PretendedGPU.waits`."""
    make, run, waits = torch.tensor, threading.Thread.run, list[str]()

    def tensor(values: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = make(values, **more)
        return made if device is None else made.to(device)

    def in_mode(thread: threading.Thread) -> None:
        with PretendedGPU(waits):
            run(thread)

    in_context = DeviceContext.__torch_function__

    def noted(context: DeviceContext, *given: Any, **more: Any) -> Any:
        before, META.inside = META.inside, context.device.type == "meta"
        try:
            return in_context(context, *given, **more)
        finally:
            META.inside = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceContext, "__torch_function__", noted)
        patch.setattr(torch, "tensor", tensor)  # C++ would ask for a GPU
        for name, answer in ANSWERS.items():
            patch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
        patch.setattr(threading.Thread, "run", in_mode)
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with PretendedGPU(waits):
                yield waits
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
