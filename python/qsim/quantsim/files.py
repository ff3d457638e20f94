"""The part of `qsim.QuantSim` that writes its encodings to files, and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from qsim.simulation import encoding_files
from qsim.simulation.encoding_files import LoadedEncodings
from qsim.simulation.simulation import Simulation


class Files(Simulation):
    """Base of `qsim.QuantSim`: encodings in files."""

    def save_encodings(self, path: str | PathLike[str], format: str = "qsim", names: Mapping[str, str] | None = None) -> None:
        """Write all encodings to a file, those of quantizers that are switched off too.

        Parameters
        ----------
        path : path-like
            Replaced as a whole, or left as it was.
        format : str
            "qsim" (lossless), "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "aimet-2.1.0" or "tensorrt-cache" (activations only). AIMET 2.x
            also gets the int32 encodings of biases.
        names : mapping of str to str, optional
            What the file calls quantizers (and biases), by key: names of ONNX tensors, for example. Others go by their keys.

        Raises
        ------
        NoEncodingError
            Before calibration.
        FileFormatError
            The format cannot hold an encoding. Nothing is written.

        Examples
        --------
        >>> import tempfile
        >>> from torch import nn
        >>> sim = qsim.QuantSim(nn.Linear(3, 2), torch.zeros(1, 3), qsim.int8(target="tensorrt"))
        >>> report = sim.calibrate([torch.ones(4, 3)], progress=False)
        >>> path = tempfile.mktemp(".cache")
        >>> sim.save_encodings(path, "tensorrt-cache", names={"input": "images"})
        >>> print(open(path).read().splitlines()[1])
        images: 3c010204
        """
        encoding_files.save_encodings(self, path, format, names)

    def load_encodings(self, path: str | PathLike[str], strict: bool = True, names: Mapping[str, str] | None = None) -> LoadedEncodings:
        """Quantize with the encodings of a file from now on. All of them are set, or, after an error, none.

        The file decides scales and zero points, and nothing else: grids and granularities are those of the simulation, and an encoding for
        another one is an error. The same numbers in another form fit: uint8 around 128 is int8 around 0, and AIMET 0.6.1 and 1.0.0, which
        do not tell the axis of channels, have that of the quantizer. Weights that have no encoding yet get one from their values where
        the file is a calibration cache, which holds none. AIMET's files by modules may name a tensor as the result of the last module of
        a chain, or as the input of the layer that reads it. int32 encodings of biases are left alone: their scales are products of others.

        Parameters
        ----------
        path : path-like
            Of any format that `qsim.load_encodings` reads.
        strict : bool
            Every enabled quantizer has to be in the file, and every name of the file has to be known. Otherwise what both have is set.
        names : mapping of str to str, optional
            What the file calls quantizers, by key, as in `save_encodings`.

        Returns
        -------
        LoadedEncodings

        Raises
        ------
        FileFormatError
            The file is damaged.
        ValueError
            It does not fit: the message lists all names that are missing, unknown, or of another grid, with close ones.

        Examples
        --------
        >>> import tempfile
        >>> path = tempfile.mktemp(".json")
        >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> report = sim.calibrate([torch.ones(4, 3)], progress=False)
        >>> sim.save_encodings(path)
        >>> other = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
        >>> loaded = other.load_encodings(path)
        >>> other.encodings()["input"].scale == sim.encodings()["input"].scale
        tensor(True)
        """
        return encoding_files.load_encodings(self, path, strict, names)
