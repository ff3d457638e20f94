"""AIMET's files as its "Encoding Format Specification" describes them, written by hand: layouts from there, numbers our own."""

INT = {"dtype": "int", "bitwidth": 8}

V0_6_1 = {
    "version": "0.6.1",
    "activation_encodings": {
        "input": [{**INT, "is_symmetric": "False", "scale": 0.25, "offset": -100, "min": -25.0, "max": 38.75}],
        "/relu/Relu_output_0": [{**INT, "bitwidth": 16, "is_symmetric": "False", "scale": 0.5, "offset": 0.0, "min": 0.0, "max": 32767.5}],
        "half": [{"dtype": "float", "bitwidth": 16}],
        "full": [{"dtype": "float", "bitwidth": 32}],
    },
    "param_encodings": {
        "conv.weight": [
            {**INT, "bitwidth": 4, "is_symmetric": "True", "scale": 0.5, "offset": -8, "min": -4.0, "max": 3.5},
            {**INT, "bitwidth": 4, "is_symmetric": "True", "scale": 0.125, "offset": -8, "min": -1.0, "max": 0.875},
            {**INT, "bitwidth": 4, "is_symmetric": "True", "scale": 2.0, "offset": -8, "min": -16.0, "max": 14.0},
        ],
        "strict.weight": [{**INT, "is_symmetric": "True", "scale": 0.5, "offset": -127, "min": -63.5, "max": 63.5}],
        "shifted.weight": [{**INT, "is_symmetric": "True", "scale": 0.5, "offset": -127, "min": -63.5, "max": 64.0, "note": "kept"}],
        "fc.bias": [
            {**INT, "bitwidth": 32, "is_symmetric": "True", "scale": 2.0**-10, "offset": -(2**31), "min": -(2.0**21), "max": 2.0**21}
        ],
    },
    "quantizer_args": {"activation_bitwidth": 8, "dtype": "int", "is_symmetric": "True", "quant_scheme": "post_training_tf_enhanced"},
    "excluded_layers": ["head"],
}

_INT = {"dtype": "INT", "bw": 8}
V1_0_0 = {
    "version": "1.0.0",
    "activation_encodings": [
        {"name": "input", **_INT, "enc_type": "PER_TENSOR", "is_sym": False, "scale": [0.25], "offset": [-100]},
        {"name": "tanh", **_INT, "bw": 16, "enc_type": "PER_TENSOR", "is_sym": True, "scale": [0.001], "offset": [-32768.0]},
        {"name": "half", "dtype": "FLOAT", "bw": 16, "enc_type": "PER_TENSOR"},
    ],
    "param_encodings": [
        {"name": "conv.weight", **_INT, "enc_type": "PER_CHANNEL", "is_sym": True, "scale": [0.5, 0.1], "offset": [-128, -128]},
        {
            **{"name": "fc.weight", **_INT, "bw": 4, "enc_type": "PER_BLOCK", "is_sym": True, "block_size": 16},
            **{"scale": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "offset": [-8] * 6},
        },
        {
            **{"name": "lpbq.weight", **_INT, "compressed_bw": 4, "enc_type": "LPBQ", "is_sym": True, "block_size": 32},
            **{"scale": [0.001, 0.002], "offset": [-128, -128], "per_block_int_scale": [3, 16, 7, 1]},
        },
        {
            "name": "moved",
            **_INT,
            "bw": 2,
            "enc_type": "PER_TENSOR",
            "is_sym": True,
            "scale": [1.0],
            "offset": [-2],
            "zero_point_shift": [0.5],
        },
    ],
    "quantizer_args": {"param_bitwidth": 8, "per_channel_quantization": True},
    "excluded_layers": [],
    "producer": {"name": "someone", "y_block": [[1], 2.5, None]},
}

V2_0_0 = {
    "version": "2.0.0",
    "encodings": [
        {"name": "input", "output_dtype": "uint8", "y_scale": 0.01, "y_zero_point": 41},
        {"name": "relu", "output_dtype": "int8", "y_scale": 0.02, "y_zero_point": -128},
        {"name": "conv.weight", "output_dtype": "int8", "y_scale": [0.01, 0.02, 0.03], "axis": 0},
        {"name": "up.weight", "output_dtype": "int16", "y_scale": [0.5, 0.25], "y_zero_point": [0, 0], "axis": -3},
        {
            "name": "fc.weight",
            "output_dtype": "uint4",
            "y_scale": [[0.1, 0.2], [0.3, 0.4]],
            "y_zero_point": [[8, 7], [6, 5]],
            "axis": 1,
            "block_size": 4,
        },
        {"name": "fc.bias", "output_dtype": "int32", "y_scale": [1e-4, 2e-4], "axis": 0, "anything": {"kept": True}},
        {"name": "eight", "output_dtype": "float8e4m3fn", "y_scale": 0.5},
        {"name": "four", "output_dtype": "float4e2m1", "y_scale": [[0.5, 1.0]], "axis": 1, "block_size": 16},
        {
            **{"name": "lpbq.weight", "output_dtype": "int4", "axis": 1, "block_size": 4},
            **{"per_block_int_scale": [[3, 16], [7, 1]], "per_channel_float_scale": [[0.001], [0.002]]},
        },
        {"name": "moved", "output_dtype": "int2", "y_scale": [0.1, 0.2], "y_zero_point": [-0.5, -0.5], "axis": 0},
    ],
    "quantizer_args": {"activation_bitwidth": 8},
}

V2_1_0 = {
    "version": "2.1.0",
    "encodings": [
        *V2_0_0["encodings"],
        {
            **{"name": "double", "output_dtype": "int4", "axis": 1, "block_size": 32},
            "y_scale": {"x": [[3, 5], [11, 9], [7, 16]], "x_scale": [0.001, 0.002, 0.003], "axis": 0},
        },
        {
            **{"name": "blocks", "output_dtype": "int4", "axis": 1, "block_size": 8},
            "y_scale": {"x": [[3, 5, 7], [2, 4, 6]], "x_scale": [[0.5, 1.0], [2.0, 4.0]], "axis": 1, "block_size": 2, "x_zero_point": 1},
        },
        {
            **{"name": "nvfp4", "output_dtype": "float4e2m1", "axis": 1, "block_size": 16},
            "y_scale": {"x": [[0.5, 1.0], [2.0, 1.5]], "x_scale": 0.0009, "input_dtype": "float8e4m3fn"},
        },
    ],
}

_ASYMMETRIC = {**INT, "is_symmetric": "False", "scale": 0.25, "offset": -100, "min": -25.0, "max": 38.75}
TORCH = {  # as save_encodings_to_json writes it: by the names of modules, without a version
    "activation_encodings": {
        "conv1": {"input": {"0": _ASYMMETRIC}, "output": {"0": {**_ASYMMETRIC, "offset": 0, "min": 0.0, "max": 63.75}}},
        "lstm": {"input": {"1": _ASYMMETRIC}, "output": {"1": _ASYMMETRIC}},
        "half": {"output": {"0": {"bitwidth": 16, "dtype": "float"}}},
        "several": {"output": {"0": [{**INT, "is_symmetric": "True", "scale": scale, "offset": -128} for scale in (0.5, 2.0)]}},
        "": {"output": {"0": _ASYMMETRIC}},
    },
    "param_encodings": {
        "conv1.weight": [{**INT, "bitwidth": 4, "is_symmetric": "True", "scale": scale, "offset": -8} for scale in (0.5, 0.125)],
        ".weight": [{**INT, "is_symmetric": "True", "scale": 0.5, "offset": -128}],
    },
}

AIMET = {"aimet-0.6.1": V0_6_1, "aimet-1.0.0": V1_0_0, "aimet-2.0.0": V2_0_0, "aimet-2.1.0": V2_1_0}
CACHE = (
    "TRT-10300-MinMaxCalibration\nimages: 3c010204\n(Unnamed Layer* 4) [Fully Connected]_output: 3d65992f\n/relu/Relu_output_0: 3e11094c\n"
)
