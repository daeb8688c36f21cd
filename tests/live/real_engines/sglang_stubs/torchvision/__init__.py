"""Stand-in for torchvision, which SGLang imports and text models never call: any name refuses to be used."""

import enum
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The one name whose members are read while importing."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Absent:
    """What every other name stands for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("torchvision is a stand-in here; install the real one for models that see images")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `torchvision.anything` importable."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("torchvision."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(__getattr__=__getattr__, InterpolationMode=InterpolationMode, __version__=__version__)


sys.meta_path.append(_Submodules())
