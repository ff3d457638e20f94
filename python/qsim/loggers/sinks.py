"""One way to write to every logger. Which kind an object is, is told by the methods that it has; none of their packages is imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from qsim.loggers.figures import Figures, Histogram

Write = Callable[[Figures, int], None]


def writer_of(logger: Any, caller: str) -> Write:
    """A function that writes figures of one step to `logger`.

    Parameters
    ----------
    logger : object
        Told apart by its methods, in this order: `add_scalar` (TensorBoard's and tensorboardX's SummaryWriter; histograms by
        `add_histogram_raw`), `log_metrics` (MLflow's module, Lightning's loggers), `log_dict` (a LightningModule, which knows its step),
        `log` (a run of W&B or the module, Accelerate's Accelerator, and all that have ``log(dict)``). Histograms go to TensorBoard and W&B;
        others get the scalars.
    caller : str
        For errors: "QuantSim.monitor".

    Raises
    ------
    TypeError
        It has none of these.

    Examples
    --------
    >>> class Printer:
    ...     def log(self, figures):
    ...         print(figures)
    >>> writer_of(Printer(), "example")(Figures({"loss": 0.5}), 3)
    {'loss': 0.5, 'step': 3}
    """
    if _has(logger, "add_scalar"):
        return lambda figures, step: _tensorboard(logger, figures, step)
    if _has(logger, "log_metrics"):
        return lambda figures, step: logger.log_metrics(figures.known(), step=step)
    if _has(logger, "log_dict"):
        return lambda figures, _: logger.log_dict(figures.known())
    if _has(logger, "log"):
        return lambda figures, step: _dictionary(logger, figures, step)
    got = f"the class {logger.__name__}, of which an instance logs" if isinstance(logger, type) else f"a {type(logger).__name__}"
    raise TypeError(
        f"{caller}: got {got}; expected a SummaryWriter of torch.utils.tensorboard, a run of W&B, the module mlflow, or any object with "
        "log(dict)"
    )


def _has(logger: Any, method: str) -> bool:
    return not isinstance(logger, type) and callable(getattr(logger, method, None))


def _tensorboard(writer: Any, figures: Figures, step: int) -> None:
    for name, value in figures.known().items():
        writer.add_scalar(name, value, step)
    for name, histogram in figures.histograms.items():
        if _has(writer, "add_histogram_raw"):
            _raw_histogram(writer, name, histogram, step)


def _raw_histogram(writer: Any, name: str, histogram: Histogram, step: int) -> None:
    """The counts as they are: the writer's own `add_histogram` would want every value."""
    edges, counts = histogram.edges, histogram.counts
    middles = (edges[1:] + edges[:-1]) / 2
    writer.add_histogram_raw(
        name,
        min=edges[0].item(),
        max=edges[-1].item(),
        num=counts.sum().item(),
        sum=(counts * middles).sum().item(),
        sum_squares=(counts * middles.square()).sum().item(),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )


def _dictionary(logger: Any, figures: Figures, step: int) -> None:
    values: dict[str, Any] = dict(figures.known())
    if type(logger).__module__.partition(".")[0] == "wandb" or getattr(logger, "__name__", "") == "wandb":
        import wandb

        for name, histogram in figures.histograms.items():
            values[name] = wandb.Histogram(np_histogram=(histogram.counts.tolist(), histogram.edges.tolist()))
    if _takes_step(logger.log):
        logger.log(values, step=step)
    else:
        logger.log({**values, "step": step})


def _takes_step(log: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(log).parameters
    except (TypeError, ValueError):
        return False
    return "step" in parameters
