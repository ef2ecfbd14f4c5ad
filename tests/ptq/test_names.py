"""Post-training steps are reached as qat.ptq. What pooled statistics are is tested in tests/graph/test_graph.py."""

import subprocess
import sys

import qat
from qat.ptq.correct_bias import correct_bias


def test_steps_are_reached_from_the_package():
    assert qat.ptq.correct_bias is correct_bias
    assert all(callable(getattr(qat.ptq, name)) for name in qat.ptq.__all__)
    assert "ptq" in dir(qat)


def test_the_package_alone_reaches_them_without_torch_until_then():
    code = "import sys, qat; assert 'torch' not in sys.modules; assert callable(qat.ptq.correct_bias)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
