"""Checkpoints as the library compressed-tensors itself writes them."""


def save_with_library(model, folder):
    """Compress and save a model to which the library's `apply_quantization_config` was applied, and that has its scales."""
    from compressed_tensors.compressors import ModelCompressor

    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
