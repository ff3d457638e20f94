from __future__ import annotations


class CalibrationError(RuntimeError):
    """What was observed does not give a range: nothing arrived, nothing finite arrived, or non-finite values are forbidden.

    The message names the observer or quantizer, what reached it, and what to do. Nothing that was observed is lost.

    Examples
    --------
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> sim.calibrate([])
    Traceback (most recent call last):
    qsim.errors.CalibrationError: QuantSim: calibrate got no batch. Is the iterator used up, or the data set empty?
    """


class NoEncodingError(RuntimeError):
    """A quantizer was asked to quantize before it had an encoding.

    Examples
    --------
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3))
    >>> try:
    ...     sim(torch.zeros(1, 3))
    ... except NoEncodingError as error:
    ...     print(str(error)[:48])
    QuantSim: 3 of 3 quantizers have no encoding ('i
    """


class FileFormatError(ValueError):
    """A file is not what its format asks for, or cannot hold what is to be written.

    The message names the file, the entry, what was found, what was expected, and what to do. Nothing was read or written.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mktemp(".json")
    >>> _ = open(path, "w").write("{}")
    >>> try:
    ...     qsim.load_encodings(path)
    ... except FileFormatError as error:
    ...     path in str(error)
    True
    """


class AccumulatorError(ArithmeticError):
    """A sum of products leaves int32, in which integer kernels add: `QuantSim.integer` names the operation and the sum.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1)
    >>> sim = qsim.QuantSim(layer, torch.ones(1, 2), qsim.int8(target="onnxruntime"))
    >>> report = sim.calibrate([torch.ones(1, 2)], progress=False)
    >>> with torch.no_grad():  # after the scales were chosen
    ...     weight, bias = sim.model.weight.fill_(1.0), sim.model.bias.fill_(1e9)
    >>> with sim.integer():
    ...     try:
    ...         sim(torch.ones(1, 2))
    ...     except AccumulatorError as error:
    ...         "int32" in str(error)
    True
    """


class ExportError(ValueError):
    """A simulation cannot be written for a target. The message lists every tensor that is in the way, why, and what to change.

    Examples
    --------
    >>> config = qsim.Config(activation=qsim.TensorSpec(bits=12), target="tensorrt")
    >>> sim = qsim.QuantSim(torch.nn.Linear(3, 2), torch.zeros(1, 3), config)
    >>> report = sim.calibrate([torch.ones(4, 3)], progress=False)
    >>> try:
    ...     sim.export("model.onnx", target="tensorrt")
    ... except ExportError as error:
    ...     "'input': an activation in int12" in str(error)
    True
    """


class CaptureError(ExportError, RuntimeError):
    """A simulated model cannot be traced into one graph, which integer evaluation and export need. The message holds the reason.

    Examples
    --------
    >>> class Branches(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + 1 if x.sum() > 0 else x - 1
    >>> sim = qsim.QuantSim(Branches(), torch.ones(1), qsim.int8(target="onnxruntime"))
    >>> report = sim.calibrate([torch.ones(4)], progress=False)
    >>> try:
    ...     sim.kernels()
    ... except CaptureError as error:
    ...     "torch.export cannot trace Branches" in str(error)
    True
    """
