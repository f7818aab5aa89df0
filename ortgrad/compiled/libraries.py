"""The functions of a kernel, put together before they are optimized. This module imports Numba.

Numba optimizes every function by itself, generates machine code for it that nobody calls, and optimizes it
once more together with each function that calls it. Here its compiler stops when a function is written in
LLVM's language. The functions that a kernel consists of are then optimized once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Set
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes

from ortgrad.compiled import layout, processor

# The function that is called when a block has raised an exception.
_RAISED = "ortgrad_raised"


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
    """Return the function of a name for the code that is being built; `body` writes it unless it exists.

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
        state.targetctx = context = state.targetctx.subtarget(enable_nrt=False)
        context.create_cfunc_wrapper = functools.partial(_write_wrapper, context)
        codegen, name = state.targetctx.codegen(), state.func_id.func_qualname
        place = state.func_id.filename, state.func_id.firstlineno
        state.library = _Library(codegen, name, inlined=state.flags.forceinline, place=place)
        state.library.enable_object_caching()
        return False


def _write_wrapper(context: Any, library: Any, description: Any, *_: object) -> None:
    """Write the function by which C calls another one: a task that raises an exception has failed.

    Numba's own wrapper would take the GIL and print the exception.
    """
    convention = context.call_conv
    module = context.create_module("wrapper")
    kind = convention.get_function_type(description.restype, description.argtypes)
    called = ir.Function(module, kind, description.llvm_func_name)
    arguments = [context.get_value_type(each) for each in description.argtypes]
    kind = ir.FunctionType(context.get_value_type(description.restype), arguments)
    wrapper = ir.Function(module, kind, description.llvm_cfunc_wrapper_name)
    builder = ir.IRBuilder(wrapper.append_basic_block())
    status, result = convention.call_function(
        builder, called, description.restype, description.argtypes, wrapper.args
    )
    # Those of ortgrad.compiled.entry return numbers, and raise nothing: there is no such function for them.
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
    with builder.if_then(status.is_error, likely=False):
        if description.restype == types.void:
            with context.push_code_library(library):
                raised = write(context, builder, _RAISED, kind, _write_failure)
        else:
            raised = ir.Function(module, kind, _RAISED)
        builder.call(raised, wrapper.args[:1])
    builder.ret(result)
    library.add_ir_module(module)


def _write_failure(function: Any) -> None:
    builder, word = ir.IRBuilder(function.append_basic_block()), ir.IntType(64)
    place = builder.add(function.args[0], word(8 * layout.CALL_FAILED))
    builder.store(word(1), builder.inttoptr(place, word.as_pointer()))
    builder.ret_void()


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

    def __init__(
        self,
        codegen: Any,
        name: str,
        *,
        inlined: bool = False,
        optimized: bool = True,
        place: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(_Generator(codegen), name)
        self._inlined, self._optimized = inlined, optimized
        self.place = place

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

    @global_compiler_lock  # type: ignore[untyped-decorator]
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
        if any(function.name == _RAISED for function in module.functions):
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


def caller_of(library: Any, names: Set[str], files: Set[str]) -> tuple[str, int] | None:
    """Return the place of a function in one of the files that calls one of the names, perhaps indirectly."""
    for called in library._linking_libraries:
        found = caller_of(called, names, files)
        if found is not None:
            return found
    place = getattr(library, "place", None)
    return place if place is not None and place[0] in files and _needs(library, names) else None


def _needs(library: Any, names: Set[str]) -> bool:
    return any(function.name in names for function in library._final_module.functions) or any(
        _needs(called, names) for called in library._linking_libraries
    )


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
