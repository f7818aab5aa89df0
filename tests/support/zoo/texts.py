"""Some of the architectures in ONNX text: what exporters do not write, such as STFT, Scan and opset 23.

The parameters and buffers of the module are initializers, with underscores in the place of dots.
"""

from __future__ import annotations

import re

import onnx
from onnx import numpy_helper
from torch import nn

SPECTROGRAM = """
<ir_version: 10, opset_import: ["" : 20]>
spectrogram (float[N, 64] x) => (float[N, 4, M] y)
<int64[4] pads = {0, 8, 0, 8}, int64[1] last = {2}, int64[1] parts = {3}, int64 step = {4}, int64 size = {16},
 float low = {0.00001}> {
    padded = Pad <mode = "reflect"> (x, pads)
    signal = Unsqueeze (padded, last)
    spectrum = STFT <onesided = 1> (signal, step, window, size)
    squares = Mul (spectrum, spectrum)
    power = ReduceSum <keepdims = 0> (squares, parts)
    bands = MatMul (power, mel)
    clipped = Clip (bands, low)
    logarithms = Log (clipped)
    columns = Transpose <perm = [0, 2, 1]> (logarithms)
    y = Conv <pads = [1, 1]> (columns, conv_weight, conv_bias)
}
"""

_DETECTOR = """
    wave_{0} = Unsqueeze (x, one)
    padded_{0} = Pad <mode = "reflect"> (wave_{0}, pads)
    transformed_{0} = Conv <strides = [{1}]> (padded_{0}, {0}_transform_weight)
    real_{0}, imaginary_{0} = Split <axis = 1, num_outputs = 2> (transformed_{0})
    rr_{0} = Mul (real_{0}, real_{0})
    ii_{0} = Mul (imaginary_{0}, imaginary_{0})
    power_{0} = Sum (rr_{0}, ii_{0}, tiny)
    spectrum_{0} = Sqrt (power_{0})
    convolved_{0} = Conv <pads = [1, 1]> (spectrum_{0}, {0}_conv_weight, {0}_conv_bias)
    positive_{0} = Relu (convolved_{0})
    mean_{0} = ReduceMean <keepdims = 0> (positive_{0}, two)
    h_{0}, c_{0} = Split <axis = 0, num_outputs = 2> (state)
    h0_{0} = Squeeze (h_{0}, zero)
    c0_{0} = Squeeze (c_{0}, zero)
    from_x_{0} = Gemm <transB = 1> (mean_{0}, {0}_cell_weight_ih, {0}_cell_bias_ih)
    from_h_{0} = Gemm <transB = 1> (h0_{0}, {0}_cell_weight_hh, {0}_cell_bias_hh)
    gates_{0} = Add (from_x_{0}, from_h_{0})
    i_{0}, f_{0}, g_{0}, o_{0} = Split <axis = 1, num_outputs = 4> (gates_{0})
    in_{0} = Sigmoid (i_{0})
    forget_{0} = Sigmoid (f_{0})
    new_{0} = Tanh (g_{0})
    out_{0} = Sigmoid (o_{0})
    kept_{0} = Mul (forget_{0}, c0_{0})
    added_{0} = Mul (in_{0}, new_{0})
    c1_{0} = Add (kept_{0}, added_{0})
    squashed_{0} = Tanh (c1_{0})
    h1_{0} = Mul (out_{0}, squashed_{0})
    h2_{0} = Unsqueeze (h1_{0}, zero)
    c2_{0} = Unsqueeze (c1_{0}, zero)
    following_{0} = Concat <axis = 0> (h2_{0}, c2_{0})
    column_{0} = Unsqueeze (h1_{0}, two)
    shown_{0} = Relu (column_{0})
    score_{0} = Conv (shown_{0}, {0}_head_weight, {0}_head_bias)
    probability_{0} = Sigmoid (score_{0})
    y_{0} = Squeeze (probability_{0}, two)
"""

VOICE_DETECTOR = f"""
<ir_version: 10, opset_import: ["" : 20]>
detector (float[N, 60] x, float[2, N, 5] state, int64 sr) => (float[N, 1] y, float[2, N, 5] following)
<int64 rate = {{16000}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
 int64[6] pads = {{0, 0, 0, 0, 0, 4}}, float tiny = {{0.000001}}> {{
    fast = Equal (sr, rate)
    y, following = If (fast) <
        then_branch = wide () => (float[N, 1] y_wide, float[2, N, 5] following_wide) {{
            {_DETECTOR.format("wide", 8)}
        }},
        else_branch = narrow () => (float[N, 1] y_narrow, float[2, N, 5] following_narrow) {{
            {_DETECTOR.format("narrow", 4)}
        }}
    >
}}
"""

_FIELD = """
    time_{0} = Expand (t_{0}, column)
    both_{0} = Concat <axis = 1> (x_{0}, time_{0})
    inner_{0} = Gemm <transB = 1> (both_{0}, one_weight, one_bias)
    hidden_{0} = Tanh (inner_{0})
    k_{0} = Gemm <transB = 1> (hidden_{0}, two_weight, two_bias)
"""

NEURAL_ODE = f"""
<ir_version: 10, opset_import: ["" : 20]>
ode (float[N, 4] x, int64 steps) => (float[N, 4] y)
<float one = {{1}}, float half = {{0.5}}, float sixth = {{0.16666667}}, float two = {{2}},
 float[1, 1] start = {{0}}, int64[1] width = {{1}}> {{
    count = Cast <to = 1> (steps)
    h = Div (one, count)
    batch = Shape <start = 0, end = 1> (x)
    column = Concat <axis = 0> (batch, width)
    h2 = Mul (h, half)
    h6 = Mul (h, sixth)
    y, end = Loop (steps, , x, start) <body = step (int64 i, bool go, float[N, 4] x_1, float[1, 1] t_1)
        => (bool go_on, float[N, 4] x_next, float[1, 1] t_next) {{
        go_on = Identity (go)
        {_FIELD.format(1)}
        t_2 = Add (t_1, h2)
        move_1 = Mul (k_1, h2)
        x_2 = Add (x_1, move_1)
        {_FIELD.format(2)}
        t_3 = Identity (t_2)
        move_2 = Mul (k_2, h2)
        x_3 = Add (x_1, move_2)
        {_FIELD.format(3)}
        t_4 = Add (t_1, h)
        move_3 = Mul (k_3, h)
        x_4 = Add (x_1, move_3)
        {_FIELD.format(4)}
        middle = Add (k_2, k_3)
        twice = Mul (middle, two)
        slope = Sum (k_1, twice, k_4)
        move = Mul (slope, h6)
        x_next = Add (x_1, move)
        t_next = Add (t_1, h)
    }}>
}}
"""

MAMBA = """
<ir_version: 10, opset_import: ["" : 20]>
mamba (float[N, T, 8] x) => (float[N, T, 8] y)
<float epsilon = {0.000001}, float square = {2}, int64[1] last = {-1}, int64[1] one_axis = {1},
 int64[3] parts = {2, 4, 4}> {
    squares = Pow (x, square)
    mean = ReduceMean (squares, last)
    stable = Add (mean, epsilon)
    root = Sqrt (stable)
    unit_norm = Div (x, root)
    normed = Mul (unit_norm, norm_weight)
    enter = Transpose <perm = [1, 0]> (enter_weight)
    entered = MatMul (normed, enter)
    before, gate = Split <axis = -1, num_outputs = 2> (entered)
    rows = Transpose <perm = [0, 2, 1]> (before)
    convolved = Conv <group = 12, pads = [3, 0]> (rows, conv_weight, conv_bias)
    columns = Transpose <perm = [0, 2, 1]> (convolved)
    columns_gate = Sigmoid (columns)
    inner = Mul (columns, columns_gate)
    select = Transpose <perm = [1, 0]> (select_weight)
    selected = MatMul (inner, select)
    low, b, c = Split <axis = -1> (selected, parts)
    step_matrix = Transpose <perm = [1, 0]> (step_weight)
    raw = MatMul (low, step_matrix)
    shifted = Add (raw, step_bias)
    step = Softplus (shifted)
    rate = Exp (a_log)
    decay = Neg (rate)
    batch = Shape <start = 0, end = 1> (x)
    sizes = Shape <start = 0, end = 2> (a_log)
    shape = Concat <axis = 0> (batch, sizes)
    start = ConstantOfShape <value = float[1] {0}> (shape)
    final, scanned = Scan <num_scan_inputs = 4, scan_input_axes = [1, 1, 1, 1], scan_output_axes = [1],
        body = move (float[N, 12, 4] h, float[N, 12] dt, float[N, 12] u, float[N, 4] b_t, float[N, 4] c_t)
            => (float[N, 12, 4] h_next, float[N, 12] y_t) {
            dt_column = Unsqueeze (dt, last)
            exponent = Mul (dt_column, decay)
            kept = Exp (exponent)
            old = Mul (kept, h)
            moved = Mul (dt, u)
            moved_column = Unsqueeze (moved, last)
            b_row = Unsqueeze (b_t, one_axis)
            new = Mul (moved_column, b_row)
            h_next = Add (old, new)
            c_row = Unsqueeze (c_t, one_axis)
            seen = Mul (h_next, c_row)
            y_t = ReduceSum <keepdims = 0> (seen, last)
        }> (start, step, inner, b, c)
    direct = Mul (inner, d)
    total = Add (scanned, direct)
    gate_gate = Sigmoid (gate)
    open = Mul (gate, gate_gate)
    gated = Mul (total, open)
    leave = Transpose <perm = [1, 0]> (leave_weight)
    left = MatMul (gated, leave)
    y = Add (x, left)
}
"""

LLAMA = """
<ir_version: 11, opset_import: ["" : 23]>
llama (int64[N, T] ids) => (float[N, T, 13] y)
<int64 begin = {0}, int64 step = {1}, int64[1] first = {0}, int64[1] last = {1}> {
    x0 = Gather (words_weight, ids)
    n0 = RMSNormalization <epsilon = 0.000001> (x0, norms_0_weight)
    wq = Transpose <perm = [1, 0]> (q_weight)
    wkv = Transpose <perm = [1, 0]> (kv_weight)
    q = MatMul (n0, wq)
    kv = MatMul (n0, wkv)
    k, v = Split <axis = -1, num_outputs = 2> (kv)
    steps_row = Shape <start = 1, end = 2> (ids)
    steps = Squeeze (steps_row)
    range = Range (begin, steps, step)
    numbers = Cast <to = 1> (range)
    column = Unsqueeze (numbers, last)
    angles = Mul (column, frequencies)
    cos = Cos (angles)
    sin = Sin (angles)
    positions_row = Unsqueeze (range, first)
    ids_shape = Shape (ids)
    positions = Expand (positions_row, ids_shape)
    rotated_q = RotaryEmbedding <num_heads = 4> (q, cos, sin, positions)
    rotated_k = RotaryEmbedding <num_heads = 2> (k, cos, sin, positions)
    mixed = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2> (rotated_q, rotated_k, v)
    wo = Transpose <perm = [1, 0]> (out_weight)
    projected = MatMul (mixed, wo)
    x1 = Add (x0, projected)
    n1 = RMSNormalization <epsilon = 0.000001> (x1, norms_1_weight)
    wg = Transpose <perm = [1, 0]> (gate_weight)
    wu = Transpose <perm = [1, 0]> (up_weight)
    wd = Transpose <perm = [1, 0]> (down_weight)
    gate = MatMul (n1, wg)
    slope = Sigmoid (gate)
    silu = Mul (gate, slope)
    up = MatMul (n1, wu)
    inner = Mul (silu, up)
    down = MatMul (inner, wd)
    x2 = Add (x1, down)
    n2 = RMSNormalization <epsilon = 0.000001> (x2, norms_2_weight)
    wh = Transpose <perm = [1, 0]> (head_weight)
    y = MatMul (n2, wh)
}
"""


def parse(text: str, module: nn.Module) -> onnx.ModelProto:
    """The model, with the module's parameters and buffers as initializers."""
    model = onnx.parser.parse_model(text)
    for name, value in module.state_dict().items():
        if re.search(rf"\b{name.replace('.', '_')}\b", text):
            tensor = numpy_helper.from_array(value.numpy(), name.replace(".", "_"))
            model.graph.initializer.append(tensor)
    onnx.checker.check_model(model, full_check=True)
    return model
