"""What can be chosen by name is named wherever people read of it: a new row of a table fails here until the documents have it."""

import inspect
import re
from pathlib import Path

import pytest

import qsim
from qsim import ops
from qsim.checkpoints.checkpoint_formats import CHECKPOINT_FORMATS
from qsim.clinic.targets import TARGETS
from qsim.config.profile import PROFILES
from qsim.equalization.equalize import EQUALIZE_METHODS
from qsim.files import FORMATS
from qsim.numbers.block_formats import BLOCK_FORMATS
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.numbers.range_methods import RANGE_METHODS, SEARCHES
from qsim.onnx_ptq.quantize_onnx import ONNX_TARGETS
from qsim.trace.runtimes import RUNTIMES

ROOT = Path(__file__).parents[3]
SCALED = [name for name, form in FLOAT_FORMATS.items() if form.scaled]

# Names, and where each has to be: a document, or what has a docstring.
LISTED = [
    (RANGE_METHODS, qsim.TensorSpec, "docs/numerics.md", "docs/calibrate.md"),
    (SEARCHES, ops.search_range, qsim.QuantSim.set_method, qsim.quantize_onnx, "README.md"),
    (FLOAT_FORMATS, qsim.TensorSpec, ops.round_to_format, "docs/numerics.md"),
    (SCALED, ops.round_to_format_dynamic),
    (BLOCK_FORMATS, qsim.TensorSpec, "docs/dynamic.md"),
    (PROFILES, qsim.Config, "docs/targets.md"),
    (RUNTIMES, qsim.QuantSim.export, "docs/targets.md"),
    (ONNX_TARGETS, qsim.quantize_onnx),
    ([name.removesuffix("-int8") for name in TARGETS], qsim.doctor, "python/qsim/cli/doctor.py"),
    (FORMATS, qsim.QuantSim.save_encodings, "python/qsim/cli/convert.py"),
    (CHECKPOINT_FORMATS, qsim.QuantSim.save_compressed),
    (EQUALIZE_METHODS, qsim.equalize, "docs/equalization.md"),
]
CASES = [(names, place) for names, *places in LISTED for place in places]


@pytest.mark.parametrize(("names", "place"), CASES, ids=[place if isinstance(place, str) else place.__qualname__ for _, place in CASES])
def test_every_choice_is_named(names, place):
    text = (ROOT / place).read_text() if isinstance(place, str) else inspect.getdoc(place)
    missing = [name for name in names if not re.search(rf"(?<!\w){name}(?!\w)", text)]
    assert not missing, f"{place} does not name {', '.join(missing)}"


@pytest.mark.parametrize("target", RUNTIMES)
def test_every_runtime_has_a_page(target):
    assert (ROOT / f"docs/runtimes/{target}.md").exists()
