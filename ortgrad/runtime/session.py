"""ortgrad's InferenceSession, and the op library for plain onnxruntime sessions."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from ortgrad.errors import ModelError
from ortgrad.graph.feeds import has_native_order, native_order
from ortgrad.graph.loading import ModelLike, imports_domain, load_model, refused
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import all_nodes
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.keywords import checked
from ortgrad.lowering.fusion.kernel import is_fused
from ortgrad.operators.assertions import failed_check
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, find_operator
from ortgrad.pipelines.prepare import GradientModel, Kernels, computes_gradients, prepare_loaded
from ortgrad.runtime import extensions as dispatch
from ortgrad.runtime import native, subnormals
from ortgrad.runtime.bindings import Binding, size_of
from ortgrad.runtime.providers import CPU, Providers, kernels_for
from ortgrad.runtime.runs import Monitor
from ortgrad.threads import Result, call_elsewhere, forks_wait

_REGISTERED = "ortgrad.registered"
_NOT_CHOSEN, _ERRORS, _FATAL = -1, 3, 4  # logging levels
_FUSES_TOO_MUCH = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 26)
_IMPORT = onnx.OperatorSetIdProto(domain=DOMAIN, version=1)
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
# How onnxruntime refuses names of inputs and outputs.
_OF_NAMES: tuple[type[Exception], ...] = (ValueError, *onnxruntime_errors())
# The bytes of a model whose activations take little memory.
_SMALL_MODEL = 1 << 18


@checked
def get_library_path() -> str:
    """Return the path of the op library, for `SessionOptions.register_custom_ops_library`.

    >>> import onnxruntime, ortgrad
    >>> options = onnxruntime.SessionOptions()
    >>> options.register_custom_ops_library(ortgrad.get_library_path())
    """
    return dispatch.library_path()


@checked
def register(options: onnxruntime.SessionOptions) -> None:
    """Make the Python kernels available to sessions with these options. Repeated calls have no effect.

    If `log_severity_level` has not been set in the options, it becomes 3 (errors): at the default level
    onnxruntime warns about every weight that can be fed.

    >>> import numpy as np, onnxruntime, ortgrad
    >>> options = onnxruntime.SessionOptions()
    >>> ortgrad.register(options)
    >>> model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    >>> session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    >>> session.run(None, {"dY": np.float32([1, 2]), "X": np.float32([-1, 1])})
    [array([0., 2.], dtype=float32)]
    """
    if not isinstance(options, onnxruntime.SessionOptions):
        raise TypeError(f"register takes an onnxruntime.SessionOptions, not {type(options).__name__}")
    if options.log_severity_level == _NOT_CHOSEN:
        options.log_severity_level = _ERRORS
    path = get_library_path()
    if not _has_entry(options, _REGISTERED):
        options.register_custom_ops_library(path)
        # Stored in the options, because onnxruntime refuses to register a library twice.
        options.add_session_config_entry(_REGISTERED, "1")


def _has_entry(options: onnxruntime.SessionOptions, key: str) -> bool:
    try:
        options.get_session_config_entry(key)
    except RuntimeError:
        return False
    return True


@checked
class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """An onnxruntime.InferenceSession that runs gradient operators.

    The model may also be a ModelProto, and may contain gradient nodes as onnxruntime-training writes
    them. A failing kernel stops the run and raises KernelError. The default provider is the CPU. If another
    one comes before it, kernels="auto" means "onnx": ortgrad's own kernels run on the CPU.

    In a model with gradients, subnormal numbers (below 1.2e-38) are zero: behind a saturated softmax they
    make a run many times slower. The entry "session.set_denormal_as_zero" in sess_options, "0" or "1", is
    respected; without it, "1" is added.

    >>> import numpy as np, ortgrad
    >>> model = ortgrad.nodes.make_model(ortgrad.nodes.tanh_grad("dY", "Y", "dX"))
    >>> session = ortgrad.InferenceSession(model)
    >>> session.run(None, {"dY": np.float32([1, 1]), "Y": np.float32([0, 0.5])})
    [array([1.  , 0.75], dtype=float32)]
    """

    def __init__(
        self,
        path_or_bytes: ModelLike | GradientModel,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Providers | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        kernels: Kernels = "auto",
        disabled_optimizers: Collection[str] | None = None,
        enable_fallback: bool = True,
        read_config_from_model: bool | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        level = options.log_severity_level
        # NumPy and the binding of onnx make a TypeError of a KeyboardInterrupt that is raised inside of them.
        loaded = _undivided(lambda: _loaded(path_or_bytes))
        if isinstance(path_or_bytes, (str, os.PathLike)) and _has_external_data(loaded):
            options.add_session_config_entry(_EXTERNAL_FOLDER, str(Path(path_or_bytes).resolve().parent))
        if kernels == "auto" and not dispatch.runs_kernels():
            kernels = "onnx"
        kernels = kernels_for(kernels, providers, sess_options)
        chosen = kernels
        flushes = _choose_flushing(options, loaded)
        # What onnxruntime saves must be loaded again.
        internal = not options.optimized_model_filepath
        model = _undivided(lambda: _prepared(loaded, chosen, internal=internal))
        data = _serialize(model)
        if sess_options is None:
            # The pattern is a second block for all activations, beside those of the first run. It saves two
            # microseconds in a run of a small model, and nothing in others.
            options.enable_mem_pattern = len(data) < _SMALL_MODEL
        if any(map(_is_gradient_node, all_nodes(model.graph.node))):
            register(options)
        self._monitor = Monitor(
            parallel=options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL,
            # The number of iterations of a Loop may depend on the values that are fed.
            steady=all(node.op_type != "Loop" for node in all_nodes(model.graph.node)),
            compiles=kernels in ("compiled", "auto"),
            flushes=flushes,
        )
        disabled = list(disabled_optimizers or ())
        if _FUSES_TOO_MUCH:
            # onnxruntime before 1.26 fuses float64 nodes to FusedMatMul, for which it has no kernel.
            disabled.append("MatmulTransposeFusion")
        if any(node.op_type == "Dropout" and any(node.input[2:]) for node in all_nodes(model.graph.node)):
            # It would remove a Dropout in training mode if nothing reads the mask.
            disabled.append("EliminateDropout")
        further: dict[str, Any] = {"disabled_optimizers": disabled} if disabled else {}
        if read_config_from_model is not None:
            further["read_config_from_model"] = read_config_from_model
        try:
            if level == _NOT_CHOSEN:
                # onnxruntime warns about every weight that can be fed, and logs errors that it also raises.
                options.log_severity_level = _FATAL
            self._create(
                data,
                options,
                _chosen_providers(providers, options),
                provider_options,
                enable_fallback=enable_fallback,
                **further,
            )
        except onnxruntime_errors() as error:
            _raise_clearer(model, error)
            raise refused(error) from error
        finally:
            options.log_severity_level = level

    def _create(self, *arguments: Any, **keywords: Any) -> None:
        create = super().__init__

        def owned() -> None:
            # A process's first session sets up the thread on which it is made, too.
            floats = subnormals.saved()
            try:
                with native.owned_by(self._monitor):
                    create(*arguments, **keywords)
            finally:
                if floats is not None:
                    subnormals.restore(floats)
                # In place of onnxruntime's exception, if that is a consequence.
                self._monitor.raise_stray()

        # Creation cannot be stopped, but on another thread signals do not interrupt the callbacks.
        _undivided(owned)
        native.compile_kernels(self._monitor)

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: onnxruntime.RunOptions | None = None,
    ) -> Sequence[Any]:
        try:
            size = sum([value.nbytes for value in input_feed.values()])
        except AttributeError:
            # A list, a sequence or an OrtValue.
            size = sum(getattr(value, "nbytes", 0) for value in input_feed.values())
        if not all(map(has_native_order, input_feed.values())):
            input_feed = {name: native_order(value) for name, value in input_feed.items()}
        try:
            return self._monitor.run(super().run, (output_names, input_feed), run_options, size)
        except _OF_NAMES as error:
            _name_unknown(self, error, input_feed, output_names)
            raise

    def run_with_ort_values(
        self,
        output_names: Sequence[str],
        input_dict_ort_values: Mapping[str, onnxruntime.OrtValue],
        run_options: onnxruntime.RunOptions | None = None,
    ) -> Sequence[onnxruntime.OrtValue]:
        size = size_of(input_dict_ort_values.values())
        arguments = output_names, input_dict_ort_values
        try:
            return self._monitor.run(super().run_with_ort_values, arguments, run_options, size)
        except _OF_NAMES as error:
            _name_unknown(self, error, input_dict_ort_values, output_names)
            raise

    def io_binding(self) -> Binding:
        return Binding(self)

    def run_with_iobinding(
        self, iobinding: onnxruntime.IOBinding, run_options: onnxruntime.RunOptions | None = None
    ) -> None:
        size = iobinding.fed_bytes if isinstance(iobinding, Binding) else None
        self._monitor.run(super().run_with_iobinding, (iobinding,), run_options, size)

    def run_with_ortvaluevector(
        self,
        run_options: onnxruntime.RunOptions,
        feed_names: Sequence[str],
        feeds: Any,
        fetch_names: Sequence[str],
        fetches: Any,
        fetch_devices: Sequence[Any],
    ) -> None:
        run = super().run_with_ortvaluevector
        arguments = feed_names, feeds, fetch_names, fetches, fetch_devices
        self._monitor.run(lambda *given: run(given[-1], *given[:-1]), arguments, run_options)

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
            error = monitor.finish_async(run) or failed_check(message)
            callback([] if error else results, data, str(error) if error else message)

        super().run_async(output_names, input_feed, checked, user_data, run_options)


def _loaded(model: ModelLike | GradientModel) -> onnx.ModelProto | GradientModel:
    if isinstance(model, GradientModel):
        return model
    return load_model(model, external_data=False, bodies=False)


def _prepared(model: onnx.ModelProto | GradientModel, kernels: Kernels, *, internal: bool) -> onnx.ModelProto:
    if isinstance(model, GradientModel):
        return model.prepare(kernels, internal=internal)
    return prepare_loaded(model, kernels, bodies=False, internal=internal)


def _choose_flushing(options: onnxruntime.SessionOptions, model: onnx.ModelProto | GradientModel) -> bool:
    """Return whether to flush subnormal numbers; if so, the threads of the session's pool do it, too.

    The options decide. If they leave it open, it depends on whether there are gradients.
    """
    if _has_entry(options, subnormals.OPTION):
        return bool(options.get_session_config_entry(subnormals.OPTION) == "1")
    if not isinstance(model, GradientModel) and not computes_gradients(model):
        return False
    options.add_session_config_entry(subnormals.OPTION, "1")
    return True


def _undivided(function: Callable[[], Result]) -> Result:
    """Call a function on another thread, uninterrupted by signals and by forks in other threads."""

    def call() -> Result:
        with forks_wait():
            return function()

    return call_elsewhere(call)


def _chosen_providers(providers: Providers | None, options: onnxruntime.SessionOptions) -> Providers | None:
    """Return the providers that were given; if the options have none either, that of the CPU."""
    # onnxruntime warns about providers beside those of the options.
    return [CPU] if providers is None and not options.has_providers() else providers


def _is_gradient_node(node: onnx.NodeProto) -> bool:
    declared = find_operator(node.op_type, node.domain) or is_fused(node.op_type, node.domain)
    return bool(declared and any(a.name == CALL_ATTRIBUTE for a in node.attribute))


def _has_external_data(model: onnx.ModelProto | GradientModel) -> bool:
    return isinstance(model, onnx.ModelProto) and any(
        t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer
    )


def _serialize(model: onnx.ModelProto) -> bytes:
    # The import is appended to the serialized bytes, so that the caller's model is not changed.
    more = b"" if imports_domain(model) else onnx.ModelProto(opset_import=[_IMPORT]).SerializeToString()
    try:
        return model.SerializeToString() + more
    except ValueError as error:
        raise ModelError(
            "the model is larger than 2 GB: save it with external data and give the path"
        ) from error


def _name_unknown(
    session: onnxruntime.InferenceSession,
    error: Exception,
    feeds: Iterable[str],
    outputs: Iterable[str] | None,
) -> None:
    """Raise onnxruntime's error with the nearest names, if a name of an input or output is not known."""
    inputs = [value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())]
    results = [value.name for value in session.get_outputs()]
    for kind, known, given in (("input", inputs, feeds), ("output", results, outputs or ())):
        for name in given:
            if name not in known:
                text = f"the model has no {kind} {name!r}{nearest(name, known)} ({error})"
                raise type(error)(text) from error


def _raise_clearer(model: onnx.ModelProto, error: Exception) -> None:
    """Raise a ModelError with a better explanation than onnxruntime's, if there is one."""
    text = str(error)
    if "Conflicting with a registered kernel" in text or "Domain already set in registry" in text:
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
            f"unknown operators: {', '.join(missing)}. Register the library that "
            "holds them in sess_options, or add a function of that name to the model"
        ) from error
