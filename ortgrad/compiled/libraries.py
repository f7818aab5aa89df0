"""The functions of a kernel, put together before they are optimized. This module imports Numba.

Numba optimizes every function by itself, generates machine code for it that nobody calls, and optimizes it
once more together with each function that calls it. Here its compiler stops when a function is written in
LLVM's language. The functions that a kernel consists of are then optimized once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes

from ortgrad.compiled import processor

# Numba's function to raise an exception.
_RAISE = "numba_do_raise"


class Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, without what comes after the translation into LLVM's language."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_Prepare, AnnotateTypes)
        passes.finalize()
        return [passes]


def inner(function: Callable[..., Any], *, fastmath: Any = False, inlined: bool = True) -> Any:
    """Return a function that compiled code calls, and not Python.

    If it is not inlined, its loops are vectorized by themselves.
    """
    return njit(
        error_model="numpy",
        fastmath=fastmath,
        forceinline=inlined,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        pipeline_class=Compiler,
    )(function)


def write(context: Any, builder: Any, name: str, kind: Any, body: Callable[[Any], None]) -> Any:
    """Return a function for the code that is being built, which `body` writes if there is none of the name.

    It is not inlined, and not optimized: it should be written as the processor is to run it. Its name must
    say all that its body depends on.
    """
    library = _written.get(name)
    if library is None:
        library = _written[name] = _Library(context.codegen(), name, optimized=False)
        module = library.create_ir_module(name)
        function = ir.Function(module, kind, name)
        body(function)
        library.add_ir_module(module)
    context.active_code_library.add_linking_library(library)
    module = builder.module
    return module.globals[name] if name in module.globals else ir.Function(module, kind, name)


@register_pass(mutates_CFG=False, analysis_only=False)
class _Prepare(LoweringPass):  # type: ignore[misc]
    """Says where the function is to be written, before that is done."""

    _name = "ortgrad_prepare"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        # Arrays belong to onnxruntime, or to a task: without their owners there are no references to count.
        state.targetctx = state.targetctx.subtarget(enable_nrt=False)
        codegen, name = state.targetctx.codegen(), state.func_id.func_qualname
        state.library = _Library(codegen, name, inlined=state.flags.forceinline)
        state.library.enable_object_caching()
        return False


class _Generator:
    """Numba's code generator, for functions that are not loaded."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def set_env(self, name: str, environment: Any) -> None:
        """Functions without exceptions and Python objects need no environment."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Library(CPUCodeLibrary):  # type: ignore[misc]
    """A function as it is written, without those that it calls."""

    def __init__(self, codegen: Any, name: str, *, inlined: bool = False, optimized: bool = True) -> None:
        super().__init__(_Generator(codegen), name)
        self._inlined, self._optimized = inlined, optimized

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if not (self._inlined or function.is_declaration):
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)

    def add_llvm_module(self, ll_module: Any) -> None:
        self._final_module.link_in(ll_module)

    def add_linking_library(self, library: Any) -> None:
        self._linking_libraries.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    def get_llvm_str(self) -> str:
        """Return the function with all that it calls, optimized."""
        module = self._final_module.clone()
        own = {function.name for function in module.functions if not function.is_declaration}
        written = []
        for library in self._called():
            if isinstance(library, _Library) and not library._optimized:
                written.append(library)
            else:
                _link(library, module)
        _hide(module, own)
        _optimize(module)
        if any(function.name == _RAISE for function in module.functions):
            # Only now it may be evident that a function that is not inlined raises no exceptions.
            _optimize(module)
        for library in written:
            _link(library, module)
        _hide(module, own)
        return str(module)

    def _get_module_for_linking(self) -> Any:
        """Return the function with all that it calls, for one that Numba compiles in its own way."""
        module = self._final_module.clone()
        for library in self._called():
            _link(library, module)
        for function in module.functions:
            if not function.is_declaration and function.linkage == llvm.Linkage.external:
                function.linkage = "linkonce_odr"
        return module

    def _called(self) -> Iterator[Any]:
        """Return the libraries of the functions that it calls, and those that they call, callers first.

        Numba's own, which contain what they call, are last: only functions that are called are linked.
        """
        seen, waiting, others = {self}, list(self._linking_libraries), []
        while waiting:
            library = waiting.pop()
            if library in seen:
                continue
            seen.add(library)
            if isinstance(library, _Library):
                waiting += library._linking_libraries
                yield library
            else:
                others.append(library)
        yield from others


_written: dict[str, _Library] = {}


def _link(library: Any, module: Any) -> None:
    is_own = isinstance(library, _Library)
    module.link_in(library._final_module if is_own else library._get_module_for_linking(), preserve=True)


def _hide(module: Any, names: Set[str]) -> None:
    """Let no functions be called from elsewhere but those with certain names."""
    for function in module.functions:
        if not function.is_declaration and function.name not in names:
            function.linkage = "internal"


def _optimize(module: Any) -> None:
    machine = processor.target_machine()
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization, options.slp_vectorization = True, False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
