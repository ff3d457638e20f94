"""A plan: which operations to keep in float32, for configs and for the tools that build engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from qsim.config.float_plan import FloatPlan
from qsim.deploy import plan_coreml, plan_files, plan_nodes
from qsim.deploy.plan_run import PlanFiles


@dataclass(frozen=True)
class Plan(FloatPlan):
    """The operations to keep in float32 so that a model is right in a narrower format.

    Attributes
    ----------
    keep : tuple of str
        Names as overrides of `qsim.Config` match them: ``layer1.0.conv1`` for a module, ``layer1.0.add`` for an operation inside one.
    format : str
        What the rest runs in: "float16", "bfloat16", "int8" ...
    target : str
        What the plan was made for: "tensorrt-fp16".
    irreducible : bool
        The model was seen to be right with these kept, and wrong with any single one of them left out.
    probes : int
        How many sets were tried to find it.
    sqnr : float or None
        Of the model's results with these kept, in dB, or the metric that was asked for; None if it was not measured.
    note : str
        Why the search fell short; "" where it did not.
    ordinals : mapping of str to Ordinal
        Of operations that are no modules: how to tell them apart in an exported model.
    folded : mapping of str to str
        BatchNorms that are part of a kept layer here, and operations of their own in an exported model: their names, and the layer's.
    ranges : str
        Whether it was found with ranges that the config does not give; "" where it was not.

    Examples
    --------
    >>> plan = Plan(("norm.pow", "norm.mean"), "float16", "tensorrt-fp16")
    >>> Plan.from_json(plan.to_json()) == plan
    True
    >>> import qsim
    >>> qsim.fp16().with_plan(plan).spec_for("norm.mean", "mean", "activation") is None
    True
    """

    def nodes(self, model: str | PathLike[str]) -> dict[str, list[str]]:
        """The nodes of an exported ONNX model that each kept operation became: see `qsim.deploy.plan_nodes.find`.

        Examples
        --------
        >>> import tempfile
        >>> model, path = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh()).eval(), tempfile.mktemp(".onnx")
        >>> exported = torch.onnx.export(model, (torch.zeros(1, 4),), path, verbose=False)
        >>> list(Plan(("1",), "float16").nodes(path))
        ['1']
        """
        return plan_nodes.find(model, self)

    def op_selector(self) -> Callable[[Any], bool]:
        """For Core ML: see `qsim.deploy.plan_coreml.selector_source`.

        Examples
        --------
        >>> selector = Plan(("norm.pow",), "float16", "coreml-fp16").op_selector()
        >>> callable(selector)  # ct.convert(traced, compute_precision=ct.transform.FP16ComputePrecision(op_selector=selector))
        True
        """
        return plan_coreml.selector(self)

    def write(self, folder: str | PathLike[str], model: str | PathLike[str] | None = None, batch: Any = None) -> PlanFiles:
        """Write the plan, and what tools that build engines take: see `qsim.deploy.plan_files.write`.

        Examples
        --------
        >>> import tempfile
        >>> files = Plan(("norm.pow",), "float16", "coreml-fp16").write(tempfile.mkdtemp())
        >>> sorted(path.name for path in files)
        ['coreml_op_selector.py', 'modelopt.json', 'plan.json']
        """
        return plan_files.write(self, folder, model, batch)
