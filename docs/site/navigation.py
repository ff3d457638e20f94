"""Where each page stands in the site: captions and pages, as paths from the repository root without suffix."""

NAVIGATION: dict[str, list[str]] = {
    "Start": [
        "docs/install",
        "docs/calibrate",
        "docs/reports",
        "docs/gallery",
        "docs/train",
        "docs/logging",
        "docs/export",
        "examples/README",
    ],
    "Coming from": ["docs/from/aimet", "docs/from/torchao", "docs/from/modelopt", "docs/from/nncf"],
    "Recipes": ["docs/recipes/hugging_face", "docs/recipes/lightning", "docs/recipes/timm", "docs/recipes/batches"],
    "Accuracy": ["docs/restore", "docs/equalization", "docs/mixed_precision", "docs/bits", "docs/keep_in_float", "docs/distributed"],
    "Language models": ["docs/language_models", "docs/dynamic"],
    "Deployment": [
        "docs/targets",
        "docs/integer",
        "docs/fallback",
        "docs/encodings",
        "docs/runtimes/onnxruntime",
        "docs/runtimes/tensorrt",
        "docs/runtimes/openvino",
        "docs/runtimes/executorch",
        "docs/runtimes/coreml",
    ],
    "Five failures": [
        "docs/failures/range_is_not_finite",
        "docs/failures/batch_norm_in_training_mode",
        "docs/failures/tensorrt_fp16_nan",
        "docs/failures/coreml_nan",
        "docs/failures/map_base_at",
    ],
    "Reference": [
        "docs/api/simulate",
        "docs/api/configure",
        "docs/api/parts",
        "docs/api/operators",
        "docs/api/files",
        "docs/api/training",
        "docs/api/reports",
        "docs/api/errors",
        "docs/codes",
        "docs/command_line",
        "docs/numerics",
        "docs/not_simulated",
    ],
    "Project": [
        "docs/architecture",
        "docs/performance",
        "docs/versions",
        "CHANGELOG",
        "CONTRIBUTING",
        "SECURITY",
        "docs/README",
    ],
}


def toctrees() -> str:
    """Markdown for the end of the first page."""
    blocks = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *map("/{}".format, pages), "```"])
        for caption, pages in NAVIGATION.items()
    ]
    return "\n\n".join(blocks)
