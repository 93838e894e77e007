"""Makes processes that tests start leaner: a worker that starts, trains some steps and ends takes a third of the
CPU time.

Its folder is on PYTHONPATH (`lean_processes` in tests/conftest.py), so Python imports it at the start of each process.

torchmetrics, and with it Lightning, imports matplotlib and scipy wherever they are installed; training uses neither, so
they are hidden. Nearly all objects of a process are those of imported modules, which the garbage collector would scan
again and again during the imports, and once more at the end. Whatever is created later is collected as usual.

Lightning imports torch's compiler for a check of types, and torch does before an optimizer's first step. It is imported
when something is compiled: `Deferred` answers what code asks that compiles nothing. Megatron decorates some thirty
functions with ``torch.compile`` while it is imported: each is compiled when it is first called. With the environment
variable ``UNICRON_TEST_COMPILER`` all this is as usual. ``UNICRON_TEST_HIDDEN`` names further packages to hide.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FIGURES = () if os.environ.pop("UNICRON_TEST_FIGURES", None) else ("matplotlib", "scipy")
HIDDEN = frozenset((*FIGURES, *os.environ.get("UNICRON_TEST_HIDDEN", "").split()))
IMPORTED = frozenset({"unicron_lightning.agent.handler", "unicron_lightning.worker.engine"})
"""Modules of agents and workers that import Lightning or torch before them."""
USUAL = gc.get_threshold()
COMPILER = "torch._dynamo"
OPTIONS = f"{COMPILER}.config"
"""The compiler's module that DTensor imports in the first steps: it needs no other of the compiler's."""
FUSER = "megatron.core.jit"
DEFERRED = "UNICRON_TEST_COMPILER" not in os.environ


class OfLoaded(type):
    """Class of a class whose instances are those of the compiler's class of this name."""

    def __instancecheck__(cls, instance: Any) -> bool:
        compiler = sys.modules[COMPILER]
        return type(compiler) is ModuleType and isinstance(instance, getattr(compiler, cls.__name__))


class OptimizedModule(metaclass=OfLoaded):
    """Stands for the compiler's class in checks of types."""


def disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    """Return the function as it is: nothing is compiled."""
    return (lambda function: function) if function is None else function


ANSWERS = {"OptimizedModule": OptimizedModule, "disable": disable, "graph_break": lambda *_, **__: None}


class Deferred(ModuleType):
    """The compiler, whose code runs when a name other than those of `ANSWERS` is first read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ANSWERS[name] if name in ANSWERS else getattr(self.load(), name)

    def load(self) -> ModuleType:
        """Run the module's code; it is an ordinary module from then on."""
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return self


class Deferring:
    """Loader that makes a `Deferred` of a module and leaves the module's own loader to it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Deferred(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader


class Imported:
    """Loader of a module that its package has imported in the meantime."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Do nothing: the module's code has run."""


def compiled_when_called(function: Any) -> Any:
    """Stand for ``torch.compile(function)``."""

    @functools.cache
    def compiled() -> Any:
        import torch

        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


class Fusing:
    """Loader of Megatron's module whose ``jit_fuser`` decorates its functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.jit_fuser = compiled_when_called


def find_fuser(path: Any) -> ModuleSpec | None:
    """Let Megatron's functions be compiled when they are called."""
    if (spec := PathFinder.find_spec(FUSER, path)) is not None:
        spec.loader = Fusing(spec.loader)  # type: ignore[assignment]
    return spec


def find_compiler(name: str, path: Any) -> ModuleSpec | None:
    """Defer the compiler, or load it when one of its modules is imported."""
    if name == COMPILER and (spec := PathFinder.find_spec(name, path)) is not None:
        spec.loader = Deferring(spec.loader)  # type: ignore[assignment]
        return spec
    if name == OPTIONS:
        return None
    if name.startswith(f"{COMPILER}.") and isinstance(compiler := sys.modules[COMPILER], Deferred):
        compiler.load()
        if name in sys.modules:
            return ModuleSpec(name, Imported, origin=sys.modules[name].__file__)  # type: ignore[arg-type]
    return None


class Hiding:
    """Reports that the packages of `HIDDEN` are not installed, defers the compiler; a finder of ``sys.meta_path``."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname in IMPORTED:
            gc.freeze()
            gc.set_threshold(*USUAL)
        if not DEFERRED:
            return None
        return find_fuser(path) if fullname == FUSER else find_compiler(fullname, path)

    @staticmethod
    def find_distributions(context: Any) -> list[Any]:
        if context.name in HIDDEN:
            from importlib.metadata import PackageNotFoundError

            raise PackageNotFoundError(context.name)
        return []


sys.meta_path.insert(0, Hiding)
gc.set_threshold(100_000, 50, 100)
