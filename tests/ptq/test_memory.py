"""What AdaRound holds: tensors between layers, not inside; measured in a process of its own."""

import re
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch, torchvision, qat
from qat.ptq import adaround
torch.manual_seed(0)
model = torchvision.models.resnet18(weights=None).eval()
x = torch.randn({batch}, 3, {size}, {size})
prepared = qat.prepare(model, (x[:1],), qat.QATConfig(fold="static", weight=qat.QuantSpec(bits=4)))
qat.calibrate(prepared, [x])
del x
pictures = (torch.randn({batch}, 3, {size}, {size}) for _ in range({count} // {batch}))
rounded = adaround(prepared, pictures, iterations=5, progress=False)
print(len(rounded.step_reports[0].done), "layers", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "bytes")
"""


def peak(**numbers):
    run = subprocess.run([sys.executable, "-c", SCRIPT.format(**numbers)], capture_output=True, text=True)
    found = re.search(r"21 layers (\d+) bytes", run.stdout)
    assert found, run.stderr
    return int(found[1])


@pytest.mark.slow
def test_resnet18_with_1024_pictures_of_224():
    assert peak(count=1024, batch=32, size=224) < 6e9
