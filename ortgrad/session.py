"""Running: ortgrad's session, and the op library for plain onnxruntime sessions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from ortgrad import dispatch, native
from ortgrad.call import parse_call
from ortgrad.errors import ModelError
from ortgrad.models import ModelLike, imports_domain, load_model, onnxruntime_errors, refused
from ortgrad.prepare import Kernels, prepare_loaded
from ortgrad.registry import CALL_ATTRIBUTE, DOMAIN, Operator, all_operators, find_operator

_REGISTERED = "ortgrad.registered"
_NOT_CHOSEN, _ERRORS = -1, 3  # levels of logging
_FUSES_TOO_MUCH = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 26)
_IMPORT = onnx.OperatorSetIdProto(domain=DOMAIN, version=1)
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def get_library_path() -> str:
    """The op library, for `SessionOptions.register_custom_ops_library`."""
    return dispatch.library_path()


def register(options: onnxruntime.SessionOptions) -> None:
    """Make the Python kernels available to sessions with these options. Twice is once.

    If no `log_severity_level` was chosen for the options, it becomes 3 (errors): at its default level
    onnxruntime warns of every weight that can be fed.
    """
    if not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(f"register takes an onnxruntime.SessionOptions, not {type(options).__name__}")
    _register(options, all_operators())
    if options.log_severity_level == _NOT_CHOSEN:
        options.log_severity_level = _ERRORS


def _register(options: onnxruntime.SessionOptions, operators: Iterable[Operator]) -> int:
    """Register the library once, these operators in their native form too.

    Returns how many native operators the options know: all that were declared when they were registered.
    """
    path = get_library_path()
    if not _has_entry(options, _REGISTERED):
        count = native.declare(operators)
        options.register_custom_ops_library(path)
        # The options remember it themselves: onnxruntime refuses the same library twice.
        options.add_session_config_entry(_REGISTERED, str(count))
    return int(options.get_session_config_entry(_REGISTERED))


def _has_entry(options: onnxruntime.SessionOptions, key: str) -> bool:
    try:
        options.get_session_config_entry(key)
    except RuntimeError:
        return False
    return True


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """An onnxruntime.InferenceSession that runs gradient operators.

    The model may be a ModelProto too, and may hold gradient nodes as onnxruntime-training writes
    them. A kernel that fails stops the run and raises KernelError. The default provider is the CPU.
    """

    def __init__(
        self,
        path_or_bytes: ModelLike,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        kernels: Kernels = "auto",
        **kwargs: Any,
    ) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        level = options.log_severity_level
        self._monitor = _Monitor(options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL)
        model = load_model(path_or_bytes, external_data=False)
        if isinstance(path_or_bytes, (str, os.PathLike)) and _has_external_data(model):
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(Path(path_or_bytes).resolve().parent))
        prepared = prepare_loaded(model, kernels, bodies=False)
        if prepared is not model:
            model = prepared
            _bind_nodes(model, dispatch.add_monitor(self._monitor), options)
        if _FUSES_TOO_MUCH:
            # It makes a FusedMatMul of float64, for which it has no kernel.
            kwargs["disabled_optimizers"] = [*kwargs.get("disabled_optimizers", ()), "MatmulTransposeFusion"]
        try:
            if level == _NOT_CHOSEN:
                # At its default level onnxruntime warns of every weight that can be fed.
                options.log_severity_level = _ERRORS
            super().__init__(
                _serialize(model),
                options,
                providers if providers is not None else ["CPUExecutionProvider"],
                provider_options,
                **kwargs,
            )
        except onnxruntime_errors() as error:
            _explain(model, error)
            raise refused(error) from error
        finally:
            options.log_severity_level = level

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: onnxruntime.RunOptions | None = None,
    ) -> Sequence[Any]:
        with self._monitor.run(run_options) as options:
            return super().run(output_names, input_feed, options)

    def run_with_ort_values(
        self,
        output_names: Sequence[str],
        input_dict_ort_values: Mapping[str, onnxruntime.OrtValue],
        run_options: onnxruntime.RunOptions | None = None,
    ) -> Sequence[onnxruntime.OrtValue]:
        with self._monitor.run(run_options) as options:
            return super().run_with_ort_values(output_names, input_dict_ort_values, options)

    def run_with_iobinding(
        self, iobinding: onnxruntime.IOBinding, run_options: onnxruntime.RunOptions | None = None
    ) -> None:
        with self._monitor.run(run_options) as options:
            super().run_with_iobinding(iobinding, options)

    def run_with_ortvaluevector(
        self,
        run_options: onnxruntime.RunOptions,
        feed_names: Sequence[str],
        feeds: Any,
        fetch_names: Sequence[str],
        fetches: Any,
        fetch_devices: Sequence[Any],
    ) -> None:
        with self._monitor.run(run_options) as options:
            super().run_with_ortvaluevector(options, feed_names, feeds, fetch_names, fetches, fetch_devices)

    def run_async(
        self,
        output_names: Sequence[str],
        input_feed: Mapping[str, Any],
        callback: Callable[[Sequence[Any], Any, str], None],
        user_data: Any,
        run_options: onnxruntime.RunOptions | None = None,
    ) -> None:
        monitor = self._monitor
        run = monitor.start_async()

        def checked(results: Sequence[Any], data: Any, message: str) -> None:
            error = monitor.finish_async(run)
            callback([] if error else results, data, str(error) if error else message)

        super().run_async(output_names, input_feed, checked, user_data, run_options)


class _Monitor:
    """Knows which run of a session a failing kernel belongs to: a run and its kernels share a thread.

    In parallel execution mode they do not, so there one run waits for the other, and a failure
    counts against every asynchronous run that is under way.
    """

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel
        self._one_at_a_time = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._async_runs: set[_Run] = set()
        self._stray: dict[int, BaseException] = {}
        self.kept: list[object] = []

    @contextmanager
    def run(self, given: onnxruntime.RunOptions | None) -> Iterator[onnxruntime.RunOptions]:
        if self._parallel:
            with self._one_at_a_time, self._watch(0, given) as options:
                yield options
        else:
            with self._watch(threading.get_ident(), given) as options:
                yield options

    @contextmanager
    def _watch(self, key: int, given: onnxruntime.RunOptions | None) -> Iterator[onnxruntime.RunOptions]:
        # The caller's options may be shared with other runs, so only our own are used to stop.
        options = onnxruntime.RunOptions() if given is None else given
        outer = self._runs.get(key)
        run = self._runs[key] = _Run(options if given is None else None)
        try:
            yield options
        except Exception:
            # onnxruntime's "terminate flag" error is only the echo of the kernel's.
            if run.error is None:
                raise
        finally:
            if outer is None:
                del self._runs[key]
            else:
                self._runs[key] = outer
        if run.error is not None:
            raise run.error

    def start_async(self) -> _Run:
        run = _Run(None)
        self._async_runs.add(run)
        return run

    def finish_async(self, run: _Run) -> BaseException | None:
        """The error of a run that has ended; onnxruntime calls back on the thread of its kernels."""
        self._async_runs.discard(run)
        return self._stray.pop(threading.get_ident(), None) or run.error

    def kernel_failed(self, error: BaseException) -> None:
        thread = threading.get_ident()
        run = self._runs.get(0 if self._parallel else thread)
        if run is not None:
            run.fail(error)
        elif not self._parallel:
            self._stray[thread] = error
        if self._parallel:
            for async_run in list(self._async_runs):
                async_run.fail(error)


class _Run:
    def __init__(self, stop: onnxruntime.RunOptions | None) -> None:
        self._stop = stop
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        # Kernels after the first failure only see its NaN.
        self.error = self.error or error
        if self._stop is not None:
            self._stop.terminate = True


def _bind_nodes(model: onnx.ModelProto, session: int, options: onnxruntime.SessionOptions) -> None:
    """Make the gradient nodes run in this session, and their failures find their way back to it."""
    found = list(_gradient_nodes(model.graph))
    if not found:
        return
    count = _register(options, {operator for _, operator in found})
    if options.optimized_model_filepath:
        # Nodes in a file must mean something elsewhere too.
        count = 0
    for node, operator in found:
        for attribute in node.attribute:
            if attribute.name == CALL_ATTRIBUTE:
                call = parse_call(operator, attribute.s.decode()).in_session(session)
                attribute.s = call.to_json().encode()
        if native.is_declared(operator, count):
            node.domain, node.op_type = native.DOMAIN, native.op_type(operator)
    if count and all(opset.domain != native.DOMAIN for opset in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(native.DOMAIN, 1))


def _gradient_nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, Operator]]:
    for node in graph.node:
        operator = find_operator(node.op_type, node.domain)
        if operator and any(attribute.name == CALL_ATTRIBUTE for attribute in node.attribute):
            yield node, operator
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _gradient_nodes(inner)


def _has_external_data(model: onnx.ModelProto) -> bool:
    return any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer)


def _serialize(model: onnx.ModelProto) -> bytes:
    # Appended to the text rather than to the caller's model.
    more = b"" if imports_domain(model) else onnx.ModelProto(opset_import=[_IMPORT]).SerializeToString()
    try:
        return model.SerializeToString() + more
    except ValueError as error:
        raise ModelError(
            "the model is larger than 2 GB: save it with external data and give the path"
        ) from error


def _explain(model: onnx.ModelProto, error: Exception) -> None:
    """Raise a ModelError that says more than onnxruntime's, where we know more."""
    text = str(error)
    if "Conflicting with a registered kernel" in text:
        raise ModelError(
            "the op library is registered twice in these session options; "
            "use ortgrad.register(options), which does it once"
        ) from error
    functions = {(f.domain, f.name) for f in model.functions}
    missing = [
        f"{node.domain or 'ai.onnx'}::{node.op_type} (node {node.name!r})"
        for node in model.graph.node
        if (node.domain, node.op_type) not in functions
        and node.op_type in text
        and "not a registered" in text
        and not onnx.defs.has(node.op_type, node.domain)
    ]
    if missing:
        raise ModelError(
            f"nobody has these operators: {', '.join(missing)}. Register the library that "
            "holds them in sess_options, or add a function of that name to the model"
        ) from error
