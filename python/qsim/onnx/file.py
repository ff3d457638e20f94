"""Writing an ONNX model: whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from qsim.errors import ExportError

# Protocol buffers end at 2 GiB; the graph itself needs room too.
LARGE = 3 << 29


def write(model: ir.Model, path: Path, *, external_data: bool) -> list[Path]:
    """Write, check and only then put the model, and the file of its tensors, in their places.

    Parameters
    ----------
    model : ir.Model
    path : Path
        In a folder that exists. A file that is there stays as it is until the new one has been checked.
    external_data : bool
        Keep tensors in ``<path>.data``.

    Returns
    -------
    list of Path
        The files written, the model first.

    Raises
    ------
    ExportError
        The model is not valid ONNX: `onnx.checker`, with strict shape inference, says why.
    IsADirectoryError
        A folder is where the file of the tensors would be.
    """
    data = f"{path.name}.data" if external_data else None
    if data is not None and (path.parent / data).is_dir():
        raise IsADirectoryError(f"qsim: a folder is where the tensors of {str(path)!r} would be: {data!r}; move it, or take another name")
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        made = folder / path.name
        if data is None:  # tensors that lie beside the model that was read would be looked for beside this one
            ir.external_data.load_to_model(model)
        ir.save(model, made, external_data=data)
        try:
            onnx.checker.check_model(str(made), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"QuantSim.export: onnx.checker refuses the model, and nothing was written: {error}") from error
        files = [path, *([path.parent / data] if data else [])]
        for file in reversed(files):  # the model last: whoever sees it finds its tensors
            if (folder / file.name).exists():
                os.replace(folder / file.name, file)
        return [file for file in files if file.exists()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
