"""A GPU for machines without one: its tensors lie in the CPU's memory, and keep a GPU's rules.

What is made there, or sent there, says ``cuda:0``. Tensors of both sides do not meet in one call:
only copies cross over, and numpy reads none of a GPU's. Calls for which a CPU waits for the GPU are
counted: those that read a value, or whose result's size depends on values, and copies from or to
memory that is not pinned. So are the bytes of its tensors; above the limit it runs out. It computes
as a CPU does, in float32, and has no streams: it tells nothing about speed. It does not see into
other kinds of tensors, such as torchvision's tv_tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.counted_memory import CountedMemory

__all__ = ["GpuTensor", "SimulatedGpu"]

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
CROSSING = {"to", "copy_", "type", "cuda", "cpu"}
READING = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "nonzero",
    "argwhere",
    "unique",
    "masked_select",
    "equal",
    "allclose",
    "nms",
}
FROM_NUMBERS = {"tensor", "as_tensor", "new_tensor"}
PLAIN = {"_parse_to", "_has_compatible_shallow_copy_type"}
INDICES = (torch.int64, torch.int32, torch.uint8, torch.bool)


class GpuTensor(Tensor):
    """A tensor that says that it lies on a GPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return SimulatedGpu.current.call(function, args, kwargs or {})


class GpuParameter(GpuTensor, nn.Parameter):
    """A parameter of a module that was moved there."""

    __torch_function__ = GpuTensor.__torch_function__


class SimulatedGpu(TorchFunctionMode):
    """``with`` it, torch finds one GPU of ``limit`` bytes. ``waits`` counts by function and by the
    calling module.
    """

    current: SimulatedGpu

    def __init__(
        self, monkeypatch, *, limit: int = 16_000_000_000, capability: tuple[int, int] = (7, 5)
    ) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.memory = CountedMemory(limit)
        self._pinned: list[Tensor] = []
        SimulatedGpu.current = self
        result = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "_lazy_init": int,
            "set_device": _set_device,
            "empty_cache": int,
            "mem_get_info": lambda device=None: (limit - self.memory.count_held(), limit),
            "memory_reserved": lambda device=None: self.memory.count_held(),
            "max_memory_allocated": lambda device=None: self.memory.peak,
            "reset_peak_memory_stats": lambda device=None: self.memory.reset_peak(),
            "get_device_capability": lambda device=None: capability,
            "is_current_stream_capturing": lambda: False,
        }
        for name, value in result.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch.accelerator, "current_stream", lambda: SimpleNamespace(is_capturing=lambda: False)
        )
        group = torch._C._group_tensors_by_device_and_dtype
        monkeypatch.setattr(
            torch._C,
            "_group_tensors_by_device_and_dtype",
            lambda *given: _tell_device(group(*given)),
        )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.call(function, args, kwargs or {})

    def count_wait(self, name: str) -> None:
        """Note the first module, seen from here, that is not torch's own."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("torch", "tests"):
            frame = frame.f_back
        self.waits[name, frame.f_globals["__name__"]] += 1

    def call(self, function, args, kwargs):
        """One call of torch's, by the rules."""
        name = getattr(function, "__name__", str(function)).removesuffix(".default")
        # For a property, this is the attribute's name.
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        first_on_gpu = bool(args) and isinstance(args[0], GpuTensor)
        if first_on_gpu and name == "__get__" and attribute in ("device", "is_cuda", "is_cpu"):
            return {"device": DEVICE, "is_cuda": True, "is_cpu": False}[attribute]
        if first_on_gpu and name in ("numpy", "__array__"):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__":
                return _mark(function(*args), first_on_gpu, copied=False)
            if function is torch.device or name in PLAIN:
                return function(*args, **kwargs)
            if name == "pin_memory":
                self._pinned.append(args[0].clone())
                return self._pinned[-1]
            if name == "__set__":
                function(*args)
                if attribute == "data":
                    args[0].__class__ = _choose_class(
                        isinstance(args[1], GpuTensor), isinstance(args[0], nn.Parameter)
                    )
                return None
            return self._compute(function, name, args, kwargs)

    def _compute(self, function, name, args, kwargs):
        """A call that gives tensors, on the side that it names or that its tensors are on."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
        named = [device for device in map(_read_device, leaves) if device is not None]
        if name == "to" and len(tensors) > 1:
            named = [DEVICE if isinstance(tensors[1], GpuTensor) else CPU]
        where = "cuda" if ours else "cpu"
        if name in ("cuda", "cpu"):
            where = name
        if named:
            where = named[0].type
        on_gpu = where == "cuda"
        self._check(function, name, tensors, ours)
        if self._waits(name, args, kwargs, tensors, on_gpu):
            self.count_wait(name)
        if named:
            args, kwargs = tree_map(
                lambda leaf: CPU if _read_device(leaf) else leaf, (args, kwargs)
            )
        crosses = bool(tensors) and on_gpu != isinstance(tensors[0], GpuTensor)
        with self.memory if on_gpu else nullcontext():
            result = function(*args, **kwargs)
            return tree_map(lambda leaf: _mark(leaf, on_gpu, copied=crosses), result)

    def _check(self, function, name, tensors, ours) -> None:
        """No tensors of both sides, but single numbers of the CPU, and its indices into a tensor of
        the GPU's.
        """
        others = [
            tensor for tensor in tensors if not isinstance(tensor, GpuTensor) and tensor.dim()
        ]
        if not ours or not others or name in CROSSING:
            return
        is_indexed = name in ("__getitem__", "__setitem__") and tensors[0] is ours[0]
        if not is_indexed or any(tensor.dtype not in INDICES for tensor in others):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {function} got cuda:0 "
                f"{[tuple(tensor.shape) for tensor in ours]} and cpu "
                f"{[tuple(tensor.shape) for tensor in others]}"
            )

    def _waits(self, name, args, kwargs, tensors, to_gpu) -> bool:
        """Whether the CPU waits in this call for all that the GPU still has to do."""
        from_gpu = bool(tensors) and isinstance(tensors[0], GpuTensor)
        if from_gpu != to_gpu and name in CROSSING:
            pinned = {tensor.untyped_storage().data_ptr() for tensor in self._pinned}
            return not (
                kwargs.get("non_blocking") and tensors[0].untyped_storage().data_ptr() in pinned
            )
        if not from_gpu:
            return to_gpu and name in FROM_NUMBERS
        by_mask = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:2])
        return (
            name in READING
            or name in FROM_NUMBERS
            or (name == "where" and len(args) == 1)
            or (
                name == "repeat_interleave"
                and kwargs.get("output_size") is None
                and len(tensors) > 1
            )
            or (
                by_mask
                and (
                    name == "__getitem__" or (name == "__setitem__" and isinstance(args[2], Tensor))
                )
            )
        )


def _set_device(device) -> None:
    if torch.device(device).index is None:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got:{device}"
        )


def _read_device(leaf) -> torch.device | None:
    if isinstance(leaf, torch.device):
        return leaf
    if isinstance(leaf, str) and leaf.split(":")[0] in ("cuda", "cpu"):
        return torch.device(leaf)
    return None


def _tell_device(groups):
    """What C++ has put together by devices, of which it knows one only."""
    answers = {}
    for (device, dtype), value in groups.items():
        if any(isinstance(leaf, GpuTensor) for leaf in tree_leaves(value)):
            device = DEVICE
        answers[device, dtype] = value
    return answers


def _choose_class(on_gpu: bool, is_parameter: bool) -> type[Tensor]:
    if on_gpu:
        return GpuParameter if is_parameter else GpuTensor
    return nn.Parameter if is_parameter else Tensor


def _mark(leaf, on_gpu: bool, *, copied: bool):
    """A result as a tensor of its side; a copy where it crossed over."""
    if isinstance(leaf, Tensor) and copied:
        leaf = leaf.clone()
        leaf.__class__ = _choose_class(on_gpu, False)
    elif isinstance(leaf, Tensor) and on_gpu != isinstance(leaf, GpuTensor):
        leaf.__class__ = _choose_class(on_gpu, isinstance(leaf, nn.Parameter))
    return leaf
